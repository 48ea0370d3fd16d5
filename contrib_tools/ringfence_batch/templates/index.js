"use strict";
const STEP = 50;  // rows that are added at once
const embedded = document.getElementById("data");
const search = document.getElementById("search"), sort = document.getElementById("sort");
const found = document.getElementById("found"), body = document.querySelector("#tasks tbody");
let rows = [], outcomes = [], outcome = "", kind = null, shown = [], count = 0;

function take(data) {
  outcomes = data.outcomes;
  rows = data.rows.map(([id, outcome, cause, kind, seconds, tokens, cost, turns, attempts, directory, files, task], at) => ({
    at, id, outcome: data.outcomes[outcome], cause, kind: data.kinds[kind], seconds, tokens, cost, turns, attempts,
    directory, files: data.files[files], task, text: `${id}\n${cause}\n${task}`.toLowerCase(),
  }));
}

const ORDERS = {
  id: (a, b) => a.at - b.at,
  outcome: (a, b) => outcomes.indexOf(a.outcome) - outcomes.indexOf(b.outcome),
  seconds: (a, b) => b.seconds - a.seconds,
  tokens: (a, b) => (b.tokens ?? -1) - (a.tokens ?? -1),
  cost: (a, b) => (b.cost ?? -1) - (a.cost ?? -1),
  attempts: (a, b) => b.attempts - a.attempts,
};

function element(name, kind, text) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
}

function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function dollars(amount) {
  return amount >= 1 ? `$${amount.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}`
    : `$${amount.toFixed(4)}`;
}

function line(row) {
  const made = element("tr"), what = element("td"), badge = element("td"), files = element("td", "files");
  what.append(element("span", "id", row.id));
  if (row.cause) what.append(element("span", "why", row.cause));
  if (row.task) what.append(element("span", "what dim", row.task));
  badge.append(element("span", `badge ${row.outcome}`, row.outcome));
  const links = embedded ? row.files.map(([label, name]) => [label, `${row.directory}/${name}`])
    : row.attempts ? [["calls", `tasks/${row.id}/`]] : [];
  for (const [label, address] of links) {
    const link = element("a", "", label);
    link.href = address;
    link.setAttribute("aria-label", `${label} of ${row.id}`);
    files.append(link);
  }
  made.append(what, badge);
  for (const [text, name] of [
    [row.seconds ? duration(row.seconds) : "", ""], [row.tokens === null ? "" : row.tokens.toLocaleString("en"), "tokens"],
    [row.cost === null ? "" : dollars(row.cost), "cost"],
    [row.turns || "", "turns"], [row.attempts, row.attempts === 1 ? "attempt" : "attempts"],
  ]) {
    const cell = element("td", "number", text);
    if (name && text !== "") cell.dataset.name = name;
    made.append(cell);
  }
  made.append(files);
  return made;
}

function more(least = 0) {
  const next = shown.slice(count, Math.max(count + STEP, least));
  count += next.length;
  body.append(...next.map(line));
}

function show(least = 0) {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  shown = rows.filter((row) => (!outcome || row.outcome === outcome) && (kind === null || row.kind === kind)
    && words.every((word) => row.text.includes(word)));
  shown.sort((a, b) => ORDERS[sort.value](a, b) || a.at - b.at);
  for (const button of document.querySelectorAll("#outcomes button")) button.setAttribute("aria-pressed", String(button.dataset.outcome === outcome));
  found.textContent = `${shown.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} tasks`
    + (kind === null ? "" : `, with the cause "${kind}"`);
  body.replaceChildren();
  count = 0;
  more(least);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("#outcomes button, .cause");
  if (!button) return;
  [outcome, kind] = [button.dataset.outcome, button.dataset.cause ?? null];
  if (kind !== null) search.value = "";
  show();
  if (kind !== null) document.getElementById("tasks").scrollIntoView();
});
search.addEventListener("input", () => show());
sort.addEventListener("change", () => show());
new IntersectionObserver((seen) => seen[0].isIntersecting && more(), { rootMargin: "600px" })
  .observe(document.querySelector("footer"));

// What follows is for the page of `ringfence view`, which a server on this machine serves.
let token = "";

async function ask(path) {
  const answer = await fetch(path, { headers: { Authorization: `Bearer ${token}` } });
  if (!answer.ok) throw new Error(answer.status === 401 ? "open the address that `ringfence view` printed" : await answer.text());
  return answer;
}

async function refresh() {
  const place = document.getElementById("summary"), isOpen = document.querySelector("#causes")?.open ?? true;
  const focused = document.activeElement, address = focused?.getAttribute("href"), chosen = { ...focused?.dataset };
  const parsed = new DOMParser().parseFromString(await (await ask("summary")).text(), "text/html");
  take(await (await ask("data")).json());
  place.replaceChildren(...parsed.body.childNodes);
  document.title = place.querySelector("h1").textContent;
  const causes = document.getElementById("causes");
  if (causes) causes.open = isOpen;
  show(count);
  if (address) [...document.querySelectorAll("a")].find((link) => link.getAttribute("href") === address)?.focus();
  else if (!focused.isConnected) [...place.querySelectorAll("button")].find((one) => one.dataset.outcome === chosen.outcome && one.dataset.cause === chosen.cause)?.focus();
}

async function listen() {
  const status = document.getElementById("status");
  let newest = null;
  for (;;) {
    try {
      const reader = (await ask("events")).body.pipeThrough(new TextDecoderStream()).getReader();
      status.textContent = "";
      for (let text = "";;) {
        const { value, done } = await reader.read();
        if (done) break;
        text += value;
        for (let at; (at = text.indexOf("\n\n")) >= 0; text = text.slice(at + 2)) {
          const version = /^data: (.*)$/m.exec(text.slice(0, at))?.[1];
          if (version && version !== newest) { await refresh(); newest = version; }
        }
      }
      status.textContent = "Not connected: `ringfence view` has ended, or is busy.";
    } catch (error) { status.textContent = newest === null ? error.message : "Not connected: `ringfence view` has ended, or is busy."; }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

if (embedded) {
  take(JSON.parse(embedded.textContent));
  show();
} else {
  const fragment = new URLSearchParams(location.hash.slice(1));
  if (fragment.has("token")) {
    sessionStorage.setItem("ringfence-token", fragment.get("token"));
    history.replaceState(null, "", location.pathname);
  }
  token = sessionStorage.getItem("ringfence-token") || "";
  listen();
}
