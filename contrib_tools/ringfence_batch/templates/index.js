"use strict";
const STEP = 50;  // rows that are added at once
const data = JSON.parse(document.getElementById("data").textContent);
const rows = data.rows.map(([id, outcome, cause, kind, seconds, tokens, turns, attempts, directory, files, task], at) => ({
  at, id, outcome: data.outcomes[outcome], cause, kind: data.kinds[kind], seconds, tokens, turns, attempts, directory,
  files: data.files[files], task, text: `${id}\n${cause}\n${task}`.toLowerCase(),
}));
const ORDERS = {
  id: (a, b) => a.at - b.at,
  outcome: (a, b) => data.outcomes.indexOf(a.outcome) - data.outcomes.indexOf(b.outcome),
  seconds: (a, b) => b.seconds - a.seconds,
  tokens: (a, b) => (b.tokens ?? -1) - (a.tokens ?? -1),
  attempts: (a, b) => b.attempts - a.attempts,
};
const search = document.getElementById("search"), sort = document.getElementById("sort");
const found = document.getElementById("found"), body = document.querySelector("#tasks tbody");
const buttons = [...document.querySelectorAll("#outcomes button")];
let outcome = "", kind = null, shown = [], count = 0;

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

function line(row) {
  const made = element("tr"), what = element("td"), badge = element("td"), files = element("td", "files");
  what.append(element("span", "id", row.id));
  if (row.cause) what.append(element("span", "why", row.cause));
  if (row.task) what.append(element("span", "what dim", row.task));
  badge.append(element("span", `badge ${row.outcome}`, row.outcome));
  for (const [label, name] of row.files) {
    const link = element("a", "", label);
    link.href = `${row.directory}/${name}`;
    files.append(link);
  }
  made.append(what, badge);
  for (const [text, name] of [
    [row.seconds ? duration(row.seconds) : "", ""], [row.tokens === null ? "" : row.tokens.toLocaleString("en"), "tokens"],
    [row.turns || "", "turns"], [row.attempts, row.attempts === 1 ? "attempt" : "attempts"],
  ]) {
    const cell = element("td", "number", text);
    if (name && text !== "") cell.dataset.name = name;
    made.append(cell);
  }
  made.append(files);
  return made;
}

function more() {
  const next = shown.slice(count, count + STEP);
  count += next.length;
  body.append(...next.map(line));
}

function show() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  shown = rows.filter((row) => (!outcome || row.outcome === outcome) && (kind === null || row.kind === kind)
    && words.every((word) => row.text.includes(word)));
  shown.sort((a, b) => ORDERS[sort.value](a, b) || a.at - b.at);
  for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.outcome === outcome));
  found.textContent = `${shown.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} tasks`
    + (kind === null ? "" : `, with the cause "${kind}"`);
  body.replaceChildren();
  count = 0;
  more();
}

for (const button of buttons) button.addEventListener("click", () => {
  [outcome, kind] = [button.dataset.outcome, null];
  show();
});
for (const button of document.querySelectorAll(".cause")) button.addEventListener("click", () => {
  [outcome, kind] = [button.dataset.outcome, button.dataset.cause];
  search.value = "";
  show();
  document.getElementById("tasks").scrollIntoView();
});
search.addEventListener("input", show);
sort.addEventListener("change", show);
new IntersectionObserver((seen) => seen[0].isIntersecting && more(), { rootMargin: "600px" })
  .observe(document.querySelector("footer"));
show();
