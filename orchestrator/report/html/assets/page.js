// Assembles the page and, with a live server, keeps it up to date.

let page = JSON.parse(document.getElementById("data").textContent);
const current = () => page.studies[Math.min(Number(recall("study", 0)), page.studies.length - 1)];

const SECTIONS = [
  ["summary", "Summary", summary],
  ["comparison", "Studies compared", () => (page.studies.length > 1 ? comparison(page.studies) : null)],
  ["curves", "Score by round", curves],
  ["budgets", "Score against ε", byBudget],
  ["frontier", "Expected score at any ε", frontier],
  ["tables", "Tables", tables],
  ["search", "Search", search],
  ["partition", "Partition", partitions],
  ["privacy", "Privacy account", privacy],
  ["runtime", "Runtime", runtime],
  ["failures", "Failures and divergences", failures],
  ["provenance", "Provenance", provenance],
];

function progressLine(study) {
  const { finished, running, cells_ended: ended, cells_total: total, trials_ended: trials, missing, time } = study.status;
  const state = finished ? "finished" : running ? "running" : "not finished";
  return el("p", { class: "progress" }, el("span", { class: `badge ${finished ? "good" : running ? "busy" : "open"}` }, state),
    `${ended} of ${total} cells, ${trials} trials`, missing && `, ${missing} missing`,
    time.elapsed_s !== null && ` · ${duration(time.elapsed_s)}`,
    !finished && time.left_s !== null && `, about ${duration(time.left_s)} left`,
    page.live && el("span", { class: "live" }, " · updates automatically"));
}

function head() {
  const study = current(), themes = { "": "Theme: automatic", light: "Theme: light", dark: "Theme: dark" };
  const turn = el("button", { type: "button", class: "theme", onclick: () => {
    const order = Object.keys(themes), next = order[(order.indexOf(document.documentElement.dataset.theme || "") + 1) % order.length];
    if (next) document.documentElement.dataset.theme = next; else delete document.documentElement.dataset.theme;
    turn.textContent = themes[next];
  } }, themes[document.documentElement.dataset.theme || ""]);
  return [el("div", { class: "line" }, el("h1", {}, page.studies.map((s) => s.study).filter((s, k, all) => all.indexOf(s) === k).join(" and ")), turn),
    page.studies.length > 1 && el("div", { class: "controls" }, choice("study", "Shown below", page.studies.map((s, k) => [k, s.name]), draw)),
    study.description && el("p", { class: "description" }, study.description), progressLine(study)];
}

function draw() {
  const focused = document.activeElement?.id, scroll = window.scrollY, study = current();
  hideTip();
  document.getElementById("top").replaceChildren(...head().filter(Boolean));
  const sections = SECTIONS.map(([id, title, content]) => {
    const children = content(study);
    return children && el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), children);
  }).filter(Boolean);
  document.getElementById("main").replaceChildren(...sections);
  document.getElementById("contents").replaceChildren(el("ul", {}, SECTIONS.filter(([id]) => sections.some((s) => s.id === id)).map(([id, title]) => el("li", {}, el("a", { href: `#${id}` }, title)))));
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  window.scrollTo(0, scroll);
}

// ---- print everything unfolded

const folds = () => [...document.querySelectorAll("details:not([open])")];
let unfolded = [];
window.addEventListener("beforeprint", () => { unfolded = folds(); unfolded.forEach((fold) => { fold.open = true; }); });
window.addEventListener("afterprint", () => unfolded.forEach((fold) => { fold.open = false; }));

// ---- live

// A reader who is typing or choosing is not interrupted: the page is redrawn when the input loses focus.
let outdated = false;
const choosing = () => ["INPUT", "SELECT"].includes(document.activeElement?.tagName);
document.addEventListener("focusout", () => setTimeout(() => {
  if (outdated && !choosing()) { outdated = false; draw(); }
}));

async function follow() {
  let wait = page.live.every_ms;
  try {
    const answer = await fetch("data.json", { headers: page.live.tag ? { "If-None-Match": page.live.tag } : {}, cache: "no-store" });
    if (answer.status === 200) {
      const next = await answer.json();
      next.live = { ...page.live, tag: answer.headers.get("ETag") };
      page = next;
      if (choosing()) outdated = true; else draw();
    }
    document.body.classList.remove("disconnected");
  } catch {
    document.body.classList.add("disconnected");
    wait = Math.max(wait, 5000);
  }
  setTimeout(follow, wait);
}

draw();
if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
if (page.live) setTimeout(follow, page.live.every_ms);
