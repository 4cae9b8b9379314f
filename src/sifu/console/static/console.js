// Live pages without a build step: what a run does arrives as server-sent events, or is asked for where they fail.
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

function draw(panel, points, target) {
  const svg = panel.querySelector(".curve");
  if (!svg) return;
  svg.toggleAttribute("hidden", points.length < 2);
  if (points.length < 2) return;
  const first = points[0][0];
  const span = Math.max(1, points[points.length - 1][0] - first);
  const values = points.map((point) => point[1]).concat(target > 0 ? [target] : []);
  const low = Math.min(...values);
  const height = Math.max(1e-6, Math.max(...values) - low);
  const y = (value) => (112 - (104 * (value - low)) / height).toFixed(1);
  const line = points.map((point) => `${((600 * (point[0] - first)) / span).toFixed(1)},${y(point[1])}`);
  svg.querySelector(".line").setAttribute("points", line.join(" "));
  const goal = svg.querySelector(".goal");
  goal.toggleAttribute("hidden", target <= 0);
  goal.setAttribute("y1", y(target));
  goal.setAttribute("y2", y(target));
}

function show(live) {
  const panel = document.querySelector(".live");
  if (panel) {
    const work = panel.querySelector('[data-field="work"]');
    work.textContent = live.at_work ? "at work" : "idle";
    work.className = `badge ${live.at_work ? "busy" : "neutral"}`;
    set(panel, "phase", (PHASES[live.phase] || live.phase) + (live.request ? ` for ${live.request}` : ""));
    set(panel, "rounds", String(live.rounds));
    set(panel, "limit", String(live.limit));
    set(panel, "accuracy", percent(live.accuracy));
    set(panel, "held-out", live.held_out ? percent(live.held_out.accuracy) : "–");
    set(panel, "held-out-rows", live.held_out ? `on ${live.held_out.rows} held-out rows` : "");
    set(panel, "target", live.target > 0 ? `target ${percent(live.target)}` : "no target");
    set(panel, "participants", live.participants === null ? "–" : String(live.participants));
    set(panel, "left", duration(live.seconds_left));
    const bar = panel.querySelector('[data-field="progress"]');
    bar.max = live.limit;
    bar.value = live.rounds;
    draw(panel, live.curve, live.target);
  }
  const before = document.body.dataset.stamp;
  document.body.dataset.stamp = live.stamp;
  if (before && before !== live.stamp) refresh(live);
}

// When a request or a job changed, the parts of the page that show them are fetched and put in place.
async function refresh(live) {
  const answer = await fetch(location.pathname + location.search, { credentials: "same-origin" });
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of document.querySelectorAll("[data-refresh]")) {
    const fresh = page.querySelector(`[data-refresh="${part.dataset.refresh}"]`);
    // Parts that are being typed in stay as they are.
    if (fresh && !part.contains(document.activeElement)) part.replaceChildren(...fresh.childNodes);
  }
  const panel = document.querySelector(".live");
  if (panel && live) draw(panel, live.curve, live.target);
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

const curve = document.querySelector(".live .curve");
if (curve) {
  const points = curve.dataset.points.trim().split(/\s+/).filter(Boolean);
  draw(document.querySelector(".live"), points.map((point) => point.split(",").map(Number)), Number(curve.dataset.target));
}

for (const field of document.querySelectorAll("[data-filter]")) {
  field.addEventListener("input", () => {
    const sought = field.value.trim().toLowerCase();
    for (const row of document.querySelectorAll(`#${field.dataset.filter} tbody tr`)) {
      row.hidden = !row.textContent.toLowerCase().includes(sought);
    }
  });
}

if (document.body.dataset.poll) {
  setInterval(() => refresh(null).catch(() => {}), 1000 * Number(document.body.dataset.poll));
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
