// Studies side by side: every cell that at least two of them have. Differences are to the first study.

function comparison(studies) {
  const [first] = studies, other = studies.find((s) => s.objective.metric !== first.objective.metric);
  if (other) return [el("p", {}, `${first.name} has the objective ${first.objective.title}, ${other.name} has ${other.objective.title}: their scores cannot be compared.`)];
  const alone = studies.every((s) => s.settings.length === 1), oneStrategy = studies.every((s) => s.strategies.length === 1); // then their names may differ
  const identity = (cell) => JSON.stringify([alone ? "" : cell.setting, cell.method, String(cell.epsilon), oneStrategy ? "" : cell.strategy]);
  const found = distinct(studies.flatMap((s) => s.cells.map(identity))).map((id) => studies.map((s) => s.cells.find((cell) => identity(cell) === id)));
  const shared = found.filter((cells) => cells.filter(Boolean).length > 1), drawable = shared.filter((cells) => cells.filter((cell) => cell?.final).length > 1);
  const settings = distinct(studies.flatMap((s) => s.settings)), strategies = distinct(studies.flatMap((s) => s.strategies));
  return [
    el("p", {}, counted(studies, found), alone && settings.length > 1 ? ` Their settings differ (${settings.join("; ")}).` : "",
      oneStrategy && strategies.length > 1 ? ` Their search strategies differ (${strategies.join("; ")}).` : ""),
    el("p", {}, `Cost: ${studies.map(cost).join("; ")}.`),
    drawable.length > 0 && [studyLegend(studies), drawn((width) => comparedScores(studies, drawable, width), { class: "chart wide" }), note("Whiskers: one standard deviation over seeds.", "comparison")],
    shared.length > 0 && comparedTable(studies, shared),
  ];
}

function cost({ name, status: { trials_ended: trials, time } }) {
  return `${name} ${trials.toLocaleString("en")} trials${time.elapsed_s === null ? "" : ` in ${duration(time.elapsed_s)}`}`;
}

function counted(studies, found) {
  const cells = (count) => `${count} ${count === 1 ? "cell is" : "cells are"}`, all = found.filter((row) => row.every(Boolean)).length;
  const some = found.filter((row) => row.filter(Boolean).length > 1 && !row.every(Boolean)).length;
  const only = studies.map((s, k) => [found.filter((row) => row[k] && row.filter(Boolean).length === 1).length, s.name]).filter(([count]) => count).map(([count, name]) => `${count} only in ${name}`);
  return `${[`${cells(all)} in ${studies.length === 2 ? "both" : `all ${studies.length} studies`}`, ...(some ? [`${some} in some of them`] : []), ...only].join(", ")}.`;
}

const studyLook = (k) => ({ style: { fill: `var(--series-${k % 8})` } });
const studyMark = (k) => page.palette.markers[k % page.palette.markers.length];

function studyLegend(studies) {
  return el("div", { class: "legend" }, studies.map((s, k) => el("span", {}, svg("svg", { width: 14, height: 14, "aria-hidden": "true" }, mark(studyMark(k), 7, 7, 4.2, studyLook(k))), s.name)));
}

const withSpread = (study, { final }) => (final ? `${scored(study, final.mean)}${final.std === null ? "" : ` ± ${scored(study, final.std)}`}` : "–");

function comparedTable(studies, shared) {
  const [first, ...others] = studies, names = studies.map((s) => s.name), several = others.length > 1;
  const settingOf = (cells) => cells.find(Boolean).setting;
  return table({ name: "comparison", title: `${first.objective.final} of ${names.slice(0, -1).join(", ")} and ${names.at(-1)}`,
    caption: [`${several ? "Differences" : "Difference"}: ${several ? "the other studies" : others[0].name} minus ${first.name}.`, "Pairs: runs of both with the same seed; ± is the standard deviation of their differences."],
    columns: ["Method", "Budget", ...names, ...others.flatMap((s) => (several ? [`${s.name}: difference`, "Pairs"] : ["Difference", "Pairs"])), ...names.map((name) => `Chosen in ${name}`)],
    align: `ll${"r".repeat(studies.length)}${"rr".repeat(others.length)}${"p".repeat(studies.length)}`,
    groups: distinct(shared.map(settingOf)).map((setting, _, all) => ({ heading: all.length > 1 ? setting : "", rows: shared.filter((cells) => settingOf(cells) === setting).map((cells) => comparedRow(studies, cells)) })) });
}

function comparedRow(studies, cells) {
  const [first] = studies, known = cells.find(Boolean), owner = studies[cells.indexOf(known)];
  const chosen = (cell) => (cell?.chosen ? cell.search.axes.map(({ name }) => `${name} = ${short(cell.chosen[name])}`).join(", ") || "–" : "–");
  return [cellName(owner, known), budget(known.epsilon), ...cells.map((cell) => (cell ? withSpread(first, cell) : "–")),
    ...cells.slice(1).flatMap((cell) => difference(first, cells[0], cell)), ...cells.map(chosen)];
}

function difference(study, x, y) {
  if (!x?.final || !y?.final) return ["–", "–"];
  const last = (run) => run.curves[study.objective.metric]?.at(-1), gap = y.final.mean - x.final.mean;
  const gaps = x.confirm.flatMap((run) => y.confirm.filter((r) => r.seed === run.seed).map((r) => last(r) - last(run))).filter(isNumber);
  return [`${gap > 0 ? "+" : ""}${scored(study, gap)}${gaps.length > 1 ? ` ± ${scored(study, deviation(gaps))}` : ""}`, gaps.length ? String(gaps.length) : "none"];
}

function comparedScores(studies, rows, width) {
  const [first] = studies, several = distinct(rows.map((cells) => cells.find(Boolean).setting)).length > 1, left = Math.min(width * 0.45, 300), top = 6;
  const step = 8, high = Math.max(26, step * studies.length + 10), ends = ({ final }) => [final.mean - (final.std || 0), final.mean + (final.std || 0)];
  const range = extent(rows.flatMap((cells) => cells.filter((cell) => cell?.final).flatMap(ends)));
  const { root, sx } = frame({ width, height: rows.length * high + top + 40, left, top, label: `${first.objective.final} of ${studies.map((s) => s.name).join(", ")}`,
    x: { domain: padded(range), label: `${first.objective.final}${first.objective.unit}` }, y: { domain: [0, 1], ticks: [], label: "" } });
  const points = [], most = Math.floor(left / 7) - 1;
  rows.forEach((cells, row) => {
    const known = cells.find(Boolean), middle = top + (row + 0.5) * high;
    const name = `${cellName(studies[cells.indexOf(known)], known)}, ${budget(known.epsilon)}${several ? `, ${known.setting}` : ""}`;
    root.append(svg("text", { class: "tick", x: left - 8, y: middle + 4, "text-anchor": "end" }, name.length > most ? name.slice(0, most) + "…" : name));
    cells.forEach((cell, k) => {
      if (!cell?.final) return;
      const [low, most] = ends(cell), y = middle + (k - (studies.length - 1) / 2) * step;
      root.append(svg("line", { class: "whisker", x1: sx(low), x2: sx(most), y1: y, y2: y, style: { stroke: `var(--series-${k % 8})` } }), mark(studyMark(k), sx(cell.final.mean), y, 4.2, studyLook(k)));
      points.push({ x: sx(cell.final.mean), y, cell, study: studies[k], name });
    });
  });
  return cursor(root, points, ({ cell, study, name }) => [name, `${study.name}: ${withSpread(study, cell)}`]);
}
