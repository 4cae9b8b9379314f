// Live pages, without a build step. The state of a run arrives as server-sent events; if they fail, the page polls.
"use strict";

const PHASES = { training: "Training", retraining: "Retraining", ready: "Ready" };

function percent(value) {
  return value === null ? "–" : `${(100 * value).toFixed(1)}\u00a0%`;
}

function duration(seconds) {
  if (seconds === null) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function set(panel, field, text) {
  const place = panel.querySelector(`[data-field="${field}"]`);
  if (place && place.textContent !== text) place.textContent = text;
}

function figure(value) {
  return String(Number(value.toPrecision(4)));
}

function heldOut(figures) {
  if (figures.accuracy !== null) return percent(figures.accuracy);
  return figure(figures.r2 === null ? figures.mean_squared_error : figures.r2);
}

function show(live) {
  const panel = document.querySelector(".live");
  if (panel) {
    const work = panel.querySelector('[data-field="work"]');
    work.textContent = live.at_work ? "working" : "idle";
    work.className = `badge ${live.at_work ? "busy" : "neutral"}`;
    set(panel, "phase", (PHASES[live.phase] || live.phase) + (live.request ? ` for ${live.request}` : ""));
    set(panel, "rounds", String(live.rounds));
    set(panel, "expected", live.expected_words);
    set(panel, "accuracy", percent(live.accuracy));
    set(panel, "held-out", live.held_out ? heldOut(live.held_out) : "–");
    if (live.mean_squared_error !== null) set(panel, "error", figure(live.mean_squared_error));
    set(panel, "held-out-rows", live.held_out ? `on ${live.held_out.rows} held-out rows` : "");
    set(panel, "target", live.measured_words);
    set(panel, "participants", live.participants === null ? "–" : String(live.participants));
    set(panel, "left", duration(live.seconds_left));
    const bar = panel.querySelector('[data-field="progress"]');
    bar.hidden = !live.at_work;
    if (live.expected === null) {
      bar.removeAttribute("value");
    } else {
      bar.max = Math.max(live.expected, live.rounds, 1);
      bar.value = live.rounds;
    }
    // The server draws the charts from numbers only. Charts under the pointer are not replaced.
    const charts = panel.querySelector('[data-field="charts"]');
    if (charts.dataset.made !== live.charts && !charts.matches(":hover")) {
      charts.innerHTML = live.charts;
      charts.dataset.made = live.charts;
    }
  }
  const before = document.body.dataset.stamp;
  document.body.dataset.stamp = live.stamp;
  if (before && before !== live.stamp) refresh();
}

// After a change of a request or a job, fetch the page again and replace the sections that differ.
async function refresh() {
  const answer = await fetch(location.pathname + location.search, { credentials: "same-origin" });
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of document.querySelectorAll("[data-refresh]")) {
    const fresh = page.querySelector(`[data-refresh="${part.dataset.refresh}"]`);
    // Keep sections that have the focus or did not change, and keep details open that the visitor opened.
    if (!fresh || part.contains(document.activeElement) || part.innerHTML === fresh.innerHTML) continue;
    const unfolded = new Set([...part.querySelectorAll("details[open] > summary")].map((title) => title.textContent));
    for (const title of fresh.querySelectorAll("details > summary")) {
      if (unfolded.has(title.textContent)) title.parentElement.open = true;
    }
    part.replaceChildren(...fresh.childNodes);
  }
}

function watch(address) {
  let asking = null;
  const ask = async () => {
    const answer = await fetch(`${address}/live`, { credentials: "same-origin" });
    if (answer.ok) show(await answer.json());
  };
  const source = new EventSource(`${address}/stream`);
  source.onmessage = (event) => {
    clearInterval(asking);
    asking = null;
    show(JSON.parse(event.data));
  };
  source.onerror = () => {
    if (asking === null) asking = setInterval(() => ask().catch(() => {}), 5000);
  };
}

if (document.body.dataset.live) watch(document.body.dataset.live);

for (const field of document.querySelectorAll("[data-filter]")) {
  field.addEventListener("input", () => {
    const sought = field.value.trim().toLowerCase();
    for (const row of document.querySelectorAll(`#${field.dataset.filter} tbody tr`)) {
      row.hidden = !row.textContent.toLowerCase().includes(sought);
    }
  });
}

if (document.body.dataset.poll) {
  setInterval(() => refresh().catch(() => {}), 1000 * Number(document.body.dataset.poll));
}

for (const button of document.querySelectorAll("[data-print]")) {
  button.hidden = false;
  button.addEventListener("click", () => window.print());
}

for (const note of document.querySelectorAll(".note.good")) setTimeout(() => note.remove(), 12000);

for (const picker of document.querySelectorAll(".picker")) {
  picker.hidden = false;
  const search = picker.querySelector("input");
  const add = () => {
    const list = document.getElementById(picker.querySelector("[data-add]").dataset.add);
    const name = search.value.trim();
    if (name && !list.value.split("\n").includes(name)) list.value = list.value.trim() ? `${list.value.trim()}\n${name}` : name;
    search.value = "";
    search.focus();
  };
  picker.querySelector("[data-add]").addEventListener("click", add);
  search.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    add();
  });
}
