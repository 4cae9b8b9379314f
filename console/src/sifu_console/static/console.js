// Pages that stay current by polling, without a build step.
"use strict";

// Fetch the page again and replace the sections that differ. The header leaves pending messages for the next page.
async function refresh() {
  const answer = await fetch(location.pathname + location.search, { headers: { "X-Refresh": "1" } });
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of document.querySelectorAll("[data-refresh]")) {
    const fresh = page.querySelector(`[data-refresh="${part.dataset.refresh}"]`);
    // Sections with the focus, the pointer on a chart, or changed fields stay; so do details that the visitor opened.
    const fields = [...part.querySelectorAll("input, textarea")];
    const changed = fields.some((field) => field.value !== field.defaultValue || field.checked !== field.defaultChecked);
    if (!fresh || changed || part.contains(document.activeElement) || part.matches(".charts:hover")) continue;
    if (part.querySelector("[data-refresh]") && fresh.querySelector("[data-refresh]")) continue;
    const unfolded = new Set([...part.querySelectorAll("details[open] > summary")].map((title) => title.textContent));
    for (const title of fresh.querySelectorAll("details > summary")) {
      if (unfolded.has(title.textContent)) title.parentElement.open = true;
    }
    if (part.innerHTML !== fresh.innerHTML) part.replaceChildren(...fresh.childNodes);
  }
}

for (const field of document.querySelectorAll("[data-filter]")) {
  field.addEventListener("input", () => {
    const sought = field.value.trim().toLowerCase();
    for (const row of document.querySelectorAll(`#${field.dataset.filter} tbody tr`)) {
      row.hidden = !row.textContent.toLowerCase().includes(sought);
    }
  });
}

async function poll(seconds) {
  for (;;) {
    await new Promise((wake) => setTimeout(wake, 1000 * seconds));
    if (!document.hidden) await refresh().catch(() => {});
  }
}

if (document.body.dataset.poll) poll(Number(document.body.dataset.poll));

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
