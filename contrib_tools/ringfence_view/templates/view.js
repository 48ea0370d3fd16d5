"use strict";
// The page of `ringfence view`. A part of it comes from the server, or, in an exported page, from a <template>. All of
// it is escaped where it is made; what is put into the page is parsed, and scripts in it do not run.
(() => {
  const main = document.getElementById("main"), status = document.getElementById("status");
  const parts = new Map([...document.querySelectorAll("template[data-path]")].map((one) => [one.dataset.path, one]));
  const isLive = document.querySelector("script[src]") !== null;
  let selected = null, token = "", newest = "", notesAsked = 0, questionsAsked = 0;

  const PIECE = 250;  // rows of a table that are made side by side at a time

  const say = (text) => { status.textContent = text; };
  const fragment = new URLSearchParams(location.hash.slice(1));
  if (isLive) {
    if (fragment.has("token")) {
      sessionStorage.setItem("ringfence-token", fragment.get("token"));
      history.replaceState(null, "", location.pathname + (fragment.get("at") ? "#" + fragment.get("at") : ""));
    }
    token = sessionStorage.getItem("ringfence-token") || "";
  }

  async function ask(path, options = {}) {
    const answer = await fetch(path, { ...options, headers: { Authorization: "Bearer " + token, ...options.headers } });
    if (!answer.ok) throw new Error(answer.status === 401 ? "open the address that `ringfence view` printed" : await answer.text());
    return answer;
  }

  async function load(path) {
    if (!isLive) {
      const found = parts.get(path);
      if (!found) throw new Error("this is not in the exported page");
      return found.content.cloneNode(true);
    }
    const parsed = new DOMParser().parseFromString(await (await ask(path)).text(), "text/html");
    const found = document.createDocumentFragment();
    found.append(...parsed.body.childNodes);
    return found;
  }

  async function tried(work) {
    try { return await work(); } catch (error) { say(error.message); return undefined; }
  }

  const rows = () => [...document.querySelectorAll("#rows > li[id]:not([hidden])")];

  function select(item) {
    if (!item) return;
    if (selected) selected.classList.remove("selected");
    selected = item;
    item.classList.add("selected");
    item.querySelector("button.row").focus();
    item.scrollIntoView({ block: "nearest" });
  }

  async function toggle(item, open) {
    const button = item.querySelector("button.row"), place = item.querySelector(".entry");
    if (open === undefined) open = place.hidden;
    if (open && !place.childNodes.length) {
      const content = await tried(() => load(button.dataset.entry));
      if (!content) return;
      if (!place.childNodes.length) place.append(content);
      if (document.body.classList.contains("split")) place.querySelectorAll("table.diff").forEach(splitTable);
    }
    place.hidden = !open;
    item.classList.toggle("open", open);
    button.setAttribute("aria-expanded", String(open));
    if (open) history.replaceState(null, "", "#" + item.id);
  }

  const pause = () => new Promise((resolve) => setTimeout(resolve));

  function unsplitTable(table) {
    table.querySelectorAll("tbody.split").forEach((one) => one.remove());
    if (table.tBodies[0]) table.tBodies[0].hidden = false;
    columns(table, ["n", "n", "s", ""]);
  }

  // Side by side: removed lines beside those that took their place. A long table is made in pieces, so that the page
  // does not stand still meanwhile.
  async function splitTable(table) {
    const unified = table.tBodies[0];
    if (!unified || !table.querySelector("col")) return;
    unsplitTable(table);
    const made = table.splitMade = (table.splitMade ?? 0) + 1, rows = [...unified.rows];
    let body, old = [], fresh = [];
    const begin = () => { body = document.createElement("tbody"); body.className = "split"; };
    const isOurs = () => table.splitMade === made && document.body.classList.contains("split");
    begin();
    const cell = (row, at, kind) => {
      const made = row ? row.cells[at].cloneNode(true) : document.createElement("td");
      if (row) made.classList.add(kind);
      return made;
    };
    const flush = () => {
      for (let at = 0; at < Math.max(old.length, fresh.length); at++) {
        const line = body.insertRow();
        line.append(cell(old[at], 0, "del"), cell(old[at], 3, "del"), cell(fresh[at], 1, "add"), cell(fresh[at], 3, "add"));
      }
      old = []; fresh = [];
    };
    unified.hidden = true;
    columns(table, ["n", "", "n", ""]);
    for (const row of rows) {
      if (!old.length && fresh.length >= PIECE) flush();
      if (body.rows.length >= PIECE && !old.length && !fresh.length) {
        table.append(body);
        begin();
        await pause();
        if (!isOurs()) return;
      }
      if (row.classList.contains("del")) { if (fresh.length) flush(); old.push(row); }
      else if (row.classList.contains("add")) fresh.push(row);
      else {
        flush();
        const line = body.insertRow();
        line.className = row.className;
        if (row.cells.length === 4 && row.classList.contains("same")) line.append(...[0, 3, 1, 3].map((at) => row.cells[at].cloneNode(true)));
        else { const whole = row.cells[row.cells.length - 1].cloneNode(true); whole.colSpan = 4; whole.classList.add("c"); line.append(whole); }
      }
    }
    flush();
    table.append(body);
  }

  function columns(table, kinds) {
    table.querySelectorAll("col").forEach((one, at) => { one.className = kinds[at]; });
  }

  async function setSplit(on) {
    document.body.classList.toggle("split", on);
    document.getElementById("split").setAttribute("aria-pressed", String(on));
    for (const table of document.querySelectorAll("table.diff")) {
      if (document.body.classList.contains("split") !== on) return;  // somebody has changed their mind
      if (on) await splitTable(table);
      else { table.splitMade = (table.splitMade ?? 0) + 1; unsplitTable(table); }
      await pause();
    }
  }

  const query = () => new URLSearchParams(new FormData(document.getElementById("find")));

  async function find() {
    if (isLive) {
      const content = await tried(() => load("rows?" + query()));
      if (content) { document.getElementById("rows").replaceChildren(content); selected = null; say(rows().length + " entries shown"); }
      return;
    }
    const words = (query().get("q") || "").toLowerCase().split(/\s+/).filter(Boolean), outcome = query().get("outcome");
    for (const item of document.querySelectorAll("#rows > li[id]")) {
      const inside = parts.get("entry/" + item.id)?.content.textContent ?? "";
      const text = (item.querySelector(".row").textContent + " " + inside).toLowerCase();
      item.hidden = !(words.every((word) => text.includes(word)) && (!outcome || (outcome === "not_kept" && item.dataset.kept) || item.dataset.outcome.split(" ").includes(outcome)));
    }
    say(rows().length + " entries shown");
  }

  async function show(name) {
    for (const tab of document.querySelectorAll("[role=tab]")) {
      const is = tab.id === "tab-" + name;
      tab.setAttribute("aria-selected", String(is));
      tab.tabIndex = is ? 0 : -1;
      document.getElementById(tab.getAttribute("aria-controls")).hidden = !is;
    }
    const place = document.getElementById(name);
    if (name !== "timeline" && !place.childNodes.length) {
      const content = await tried(() => load(name));
      if (content) place.replaceChildren(content);
      if (document.body.classList.contains("split")) setSplit(true);
    }
  }

  async function follow() {
    const id = decodeURIComponent(location.hash.slice(1));
    if (!/^(step|call|aborted|change)-[\w-]+$/.test(id)) return;
    await show("timeline");
    let item = document.getElementById(id);
    if (!item && isLive) {
      const content = await tried(() => load("row/" + id));
      if (!content) return;
      document.getElementById("rows").prepend(content);
      item = document.getElementById(id);
    }
    if (item) { await toggle(item, true); select(item); }
  }

  // News of a run: the newest page, merged into what is shown, so that what is open stays open.
  async function refresh() {
    const content = await load("rows?" + query()), list = document.getElementById("rows");
    let before = list.firstChild;
    for (const item of [...content.querySelectorAll("li[id]")]) {
      const known = document.getElementById(item.id);
      if (!known) list.insertBefore(item, before);
      else {
        const row = known.querySelector(".row"), fresh = item.querySelector(".row");
        if (row.textContent !== fresh.textContent) { known.dataset.outcome = item.dataset.outcome; known.toggleAttribute("data-kept", "kept" in item.dataset); row.className = fresh.className; row.replaceChildren(...fresh.childNodes); known.querySelector(".entry").replaceChildren(); if (known.classList.contains("open")) await toggle(known, true); }
        before = known.nextSibling;
      }
    }
    document.getElementById("spending").replaceChildren(await load("spending"));
    await refreshForks();
    await showNotes();
    document.getElementById("changes")?.replaceChildren();
    if (document.getElementById("changes") && !document.getElementById("changes").hidden) await show("changes");
  }

  async function refreshForks() {
    const tab = document.getElementById("tab-forks"), table = document.getElementById("fork-table");
    if (!tab) return;
    const fresh = (await load("forks")).querySelector("#fork-table");
    tab.hidden = !fresh.querySelector("tbody tr");
    if (!table || table.innerHTML === fresh.innerHTML) return;
    const chosen = [...table.querySelectorAll("select")].map((one) => one.value);
    const name = document.activeElement?.getAttribute("aria-label");
    table.replaceWith(fresh);
    fresh.querySelectorAll("select").forEach((one, at) => { one.value = chosen[at] ?? one.value; });
    if (name) [...fresh.querySelectorAll("[aria-label]")].find((one) => one.getAttribute("aria-label") === name)?.focus();
  }

  async function showIn(id, path) {
    const content = await tried(() => load(path));
    if (!content) return;
    document.getElementById(id).replaceChildren(content);
    if (document.body.classList.contains("split")) setSplit(true);
    document.getElementById(id).scrollIntoView({ block: "nearest" });
    say("");
  }

  async function listen() {
    for (;;) {
      try {
        const reader = (await ask("events")).body.pipeThrough(new TextDecoderStream()).getReader();
        say("");
        for (let text = "";;) {
          const { value, done } = await reader.read();
          if (done) break;
          text += value;
          for (let at; (at = text.indexOf("\n\n")) >= 0; text = text.slice(at + 2)) {
            const data = /^data: (.*)$/m.exec(text.slice(0, at))?.[1];
            if (data) await tried(showQuestion);
            if (data && newest && data !== newest) await refresh();
            if (data) newest = data;
          }
        }
      } catch (error) { say(error.message); }
      say("Not connected: `ringfence view` has ended, or is busy.");
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }

  const post = (path, body) => tried(async () => (await ask(path, { method: "POST", body: new URLSearchParams(body) })).json());

  async function preview(what, given, name) {
    const body = new URLSearchParams(given), isComment = what === "comment";
    body.set("what", what);
    const answer = isComment ? { lines: [] } : await post("preview", body);
    if (!answer) return;
    document.getElementById("preview").replaceChildren(...answer.lines.map((line) => Object.assign(document.createElement("p"), { textContent: line })));
    const dialog = document.getElementById("act"), words = document.querySelector("#words textarea");
    document.getElementById("act-title").textContent = name + (isComment ? "" : "?");
    document.getElementById("becomes").hidden = isComment || what === "checkpoint";
    document.getElementById("words").hidden = !(isComment || what.startsWith("reject"));
    words.value = "";
    document.getElementById("do").textContent = isComment ? "Tell the agent" : name;
    document.getElementById("do").onclick = async () => {
      dialog.close();
      if (isComment) body.set("words", words.value);
      const done = await (isComment ? post("note", body) : post("act", { once: answer.once, words: words.value }));
      if (done) { await refresh(); say(done.lines.join("; ")); }
    };
    dialog.showModal();
  }

  async function showNotes() {
    const place = document.getElementById("notes");
    if (!place) return;
    const mine = ++notesAsked, content = await load("notes");
    if (mine !== notesAsked) return;  // a newer answer comes, or is there
    if (content.textContent.trim() !== place.textContent.trim()) place.replaceChildren(content);
  }

  // It takes no focus, and cannot be answered at once: what a person types or clicks as it comes is no answer.
  async function showQuestion() {
    const place = document.getElementById("question");
    if (!place) return;
    const mine = ++questionsAsked, content = await load("question");
    const number = (at) => at.querySelector("#asked")?.dataset.number;
    if (mine !== questionsAsked || number(content) === number(place)) return;
    const had = place.contains(document.activeElement);
    const buttons = [...content.querySelectorAll("[data-answer]")];
    buttons.forEach((one) => { one.disabled = true; });
    setTimeout(() => buttons.forEach((one) => { one.disabled = false; }), 500);
    place.replaceChildren(content);
    const asked = place.querySelector("#asked");
    document.title = (asked ? "? " : "") + main.querySelector("h1").textContent;
    if (had) (asked ?? main).focus();
    say(asked ? asked.textContent + " (key a)" : "The question is closed.");
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.matches(".row")) { select(button.parentElement); await toggle(button.parentElement); }
    else if (button.matches(".act")) await preview(button.dataset.act, button.dataset.arguments, button.getAttribute("aria-label") ?? button.textContent);
    else if (button.dataset.answer) {
      const given = { number: document.getElementById("asked").dataset.number, choice: button.dataset.answer, reason: document.querySelector("#question input").value };
      const done = await post("answer", given), said = status.textContent;
      await tried(showQuestion);
      say(done ? done.lines.join("; ") : said);
    }
    else if (button.dataset.withdraw) {
      const done = await post("note", { withdraw: button.dataset.withdraw });
      await tried(showNotes);
      if (done) say(done.lines.join("; "));
    }
    else if (button.dataset.row) {
      const content = await tried(() => load(button.dataset.row)), row = button.closest("tr"), table = button.closest("table");
      if (!content) return;
      const target = table.querySelector("tbody.split") ? [...table.tBodies[0].rows].find((one) => one.querySelector(`[data-row="${CSS.escape(button.dataset.row)}"]`)) : row;
      target.replaceWith(...content.querySelector("tbody").rows);
      if (document.body.classList.contains("split")) splitTable(table);
    } else if (button.dataset.into) await showIn(button.dataset.into, button.dataset.load);
    else if (button.dataset.load) {
      const content = await tried(() => load(button.dataset.load));
      if (content) (button.closest("li.rest") ?? button).replaceWith(content);
    } else if (button.id === "split") setSplit(!document.body.classList.contains("split"));
    else if (button.id === "help") document.getElementById("keys").showModal();
    else if (button.getAttribute("role") === "tab") await show(button.getAttribute("aria-controls"));
  });

  document.addEventListener("toggle", async (event) => {
    const file = event.target;
    if (!file.matches?.("details[data-load]") || !file.open || file.querySelector("table")) return;
    const content = await tried(() => load(file.dataset.load));
    if (content && !file.querySelector("table")) file.append(content);
    if (document.body.classList.contains("split")) file.querySelectorAll("table.diff").forEach(splitTable);
  }, true);

  let typing;
  document.addEventListener("input", (event) => {
    if (event.target.closest("#find")) { clearTimeout(typing); typing = setTimeout(find, 250); }
  });
  document.addEventListener("submit", async (event) => {
    if (event.target.method === "dialog") return;
    event.preventDefault();
    if (event.target.id === "find") await find();
    if (event.target.id === "checkpoint") await preview("checkpoint", new FormData(event.target), "Checkpoint");
    if (event.target.id === "compare") await showIn("fork-difference", "fork-difference?" + new URLSearchParams(new FormData(event.target)));
    if (event.target.id === "between") {
      const content = await tried(() => load("changes?" + new URLSearchParams(new FormData(event.target))));
      if (content) document.getElementById("changes").replaceChildren(content);
    }
  });

  document.addEventListener("keydown", async (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const typed = event.target.closest("input, select, textarea");
    if (typed) { if (event.key === "Escape") typed.blur(); return; }
    const tab = event.target.closest("[role=tab]");
    if (tab && ["ArrowLeft", "ArrowRight"].includes(event.key)) {
      const tabs = [...document.querySelectorAll("[role=tab]:not([hidden])")], next = tabs.at((tabs.indexOf(tab) + (event.key === "ArrowLeft" ? -1 : 1)) % tabs.length);
      next.focus();
      await show(next.getAttribute("aria-controls"));
    } else if (event.key === "j" || event.key === "k") {
      const all = rows(), at = selected ? all.indexOf(selected) : -1;
      select(all[event.key === "j" ? Math.min(at + 1, all.length - 1) : Math.max(at - 1, 0)]);
    } else if (event.key === "u" && selected) { await toggle(selected, false); select(selected); }
    else if (event.key === "/") { event.preventDefault(); document.querySelector("#find input").focus(); }
    else if (event.key === "a") document.getElementById("asked")?.focus();
    else if (event.key === "?") document.getElementById("keys").showModal();
  });
  window.addEventListener("hashchange", follow);

  (async () => {
    if (isLive) {
      const content = await tried(() => load("page"));
      if (!content) return;
      main.replaceChildren(content);
      document.title = main.querySelector("h1").textContent;
    }
    await follow();
    if (isLive) await tried(showQuestion);
    if (isLive) await tried(showNotes);
    if (isLive) await listen();
  })();
})();
