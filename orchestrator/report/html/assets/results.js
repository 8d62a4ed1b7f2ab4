// Results: summary, scores by round and by budget, tables, and the comparison of two studies.

const cellName = (study, cell) => (study.strategies.length > 1 ? `${cell.method} (${cell.strategy})` : cell.method);

function keysOf(study) {
  return study.methods.flatMap((method) => study.strategies.map((strategy) => ({ method, strategy, name: cellName(study, { method, strategy }) })));
}

function summary(study) {
  const several = study.findings.length > 1;
  return [
    study.findings.map((part) => [several && el("h3", {}, part.heading),
      el("ul", { class: "findings" }, part.sentences.map((sentence) => el("li", {}, sentence.text)))]),
    !study.findings.length && el("p", {}, "Nothing has been started yet."),
    bestSoFar(study),
    study.findings.some((part) => part.sentences.some((sentence) => sentence.winner)) && el("p", { class: "note" }, "± is one standard deviation over seeds. Ranges are 95% confidence intervals of the difference, paired by seed (t-test). " +
      "Significance is at 5%, with Holm's correction over the methods at that budget; the tables print the same methods bold."),
    study.caveats.length > 0 && el("div", { class: "caveats" }, el("h3", {}, "Caveats"), el("ul", {}, study.caveats.map((text) => el("li", {}, text)))),
  ];
}

function bestSoFar(study) {
  if (study.status.finished || !study.status.best.length) return null;
  return el("div", {}, el("h3", {}, "Best so far on the validation rows"), el("ul", {}, study.status.best.map((text) => el("li", {}, text))));
}

// ---- score by round

// Mean, standard deviation and values over seeds, by round.
function overSeeds(cell, metric) {
  const rounds = distinct(cell.confirm.flatMap((run) => (run.curves[metric] ? run.rounds : []))).sort((a, b) => a - b);
  return rounds.map((round) => {
    const values = cell.confirm.map((run) => run.curves[metric]?.[run.rounds.indexOf(round)]).filter(isNumber);
    return { round, values, mean: values.length ? mean(values) : null, std: deviation(values) };
  }).filter((point) => point.mean !== null);
}

const BANDS = { deviation: "one standard deviation over seeds", error: "one standard error of the mean", none: "not drawn" };
const reach = (point, band) => (band === "none" || point.std === null ? 0 : band === "error" ? point.std / Math.sqrt(point.values.length) : point.std);

function curves(study) {
  const holder = el("div");
  const cells = study.cells.filter((cell) => cell.confirm.length);
  if (!cells.length) return [el("p", {}, "No winner has been confirmed yet.")];
  const metrics = distinct(cells.flatMap((cell) => cell.confirm.flatMap((run) => Object.keys(run.curves))));
  const draw = () => {
    const setting = recall("curve-setting"), metric = recall("curve-metric"), band = recall("curve-band");
    const mine = cells.filter((cell) => cell.setting === setting && shown(cell));
    const all = mine.map((cell) => ({ cell, points: overSeeds(cell, metric) })).filter(({ points }) => points.length);
    const traces = recall("curve-traces"), kind = recall("curve-rounds");
    const rangeOf = (some) => extent(some.flatMap(({ points }) => points.flatMap((p) => [p.mean - reach(p, band), p.mean + reach(p, band), ...(traces ? p.values : [])])));
    const common = rangeOf(all), log = metric === study.objective.metric && study.objective.lower && common && common[0] > 0;
    const epsilons = study.epsilons.filter((epsilon) => cells.some((cell) => cell.setting === setting && cell.epsilon === epsilon));
    holder.replaceChildren(el("div", { class: "panels" }, epsilons.map((epsilon) => el("figure", {},
      el("figcaption", {}, budget(epsilon)),
      drawn((width) => {
        const mine = all.filter(({ cell }) => cell.epsilon === epsilon);
        return curvePanel(study, mine, { width, metric, band, traces, kind, log, range: recall("curve-height") === "own" ? rangeOf(mine) : common });
      })))),
    el("p", { class: "note" }, `Lines are means over the confirm seeds; the band is ${BANDS[band]}${traces ? "; thin lines are single seeds" : ""}. ` +
      "Arrow keys move the cursor of a focused chart."));
  };
  const controls = el("div", { class: "controls" },
    choice("curve-setting", "Setting", study.settings.map((s) => [s, s]), draw),
    choice("curve-metric", "Metric", metrics.map((m) => [m, study.metrics[m]]), draw, study.objective.metric),
    choice("curve-band", "Band", [["deviation", "standard deviation"], ["error", "standard error"], ["none", "none"]], draw),
    choice("curve-rounds", "Rounds", [["linear", "linear"], ["log", "logarithmic"]], draw),
    choice("curve-height", "Vertical range", [["common", "same for all budgets"], ["own", "by budget"]], draw),
    tick("curve-traces", "single seeds", draw));
  draw();
  return [controls, legend(study, keysOf(study), draw), holder];
}

function curvePanel(study, series, { width, metric, band, traces, kind, range, log }) {
  const height = Math.round(Math.max(220, Math.min(330, width * 0.68)));
  if (!series.length || !range) return el("p", { class: "note" }, "Nothing to show.");
  const rounds = extent(series.flatMap(({ points }) => points.map((p) => p.round)));
  const { root, sx, sy } = frame({ width, height, label: `${study.metrics[metric]} by round: ${series.map(({ cell }) => cellName(study, cell)).join(", ")}`,
    x: { domain: rounds, kind, whole: true, label: kind === "log" ? "round (logarithmic)" : "round" },
    y: { domain: log ? [range[0] / 1.1, range[1] * 1.1] : padded(range), kind: log ? "log" : "linear", label: study.metrics[metric] } });
  const points = [];
  for (const { cell, points: curve } of series) {
    const colour = colourOf(study, cell.method, cell.strategy);
    if (band !== "none" && curve.some((p) => p.std !== null)) {
      const low = (p) => (log ? Math.max(p.mean - reach(p, band), range[0]) : p.mean - reach(p, band));
      const edge = [...curve.map((p) => [sx(p.round), sy(p.mean + reach(p, band))]), ...curve.toReversed().map((p) => [sx(p.round), sy(low(p))])];
      root.append(svg("path", { class: "band", d: path(edge) + "Z", fill: colour }));
    }
    if (traces) {
      for (const run of cell.confirm) {
        const single = run.rounds.map((t, k) => [t, run.curves[metric]?.[k]]).filter(([, v]) => isNumber(v));
        root.append(svg("path", { class: "trace", d: path(single.map(([t, v]) => [sx(t), sy(v)])), stroke: colour }));
      }
    }
    root.append(seriesLine(study, cell.method, cell.strategy, curve.map((p) => [sx(p.round), sy(p.mean)])));
    const step = Math.max(1, Math.ceil(curve.length / 8));
    curve.forEach((p, k) => {
      if ((curve.length - 1 - k) % step === 0) root.append(mark(markerOf(study, cell.method, cell.strategy), sx(p.round), sy(p.mean), 3.4, inked(study, cell.method, cell.strategy)));
      points.push({ x: sx(p.round), y: sy(p.mean), p, cell });
    });
  }
  return cursor(root, points, ({ p, cell }) => [cellName(study, cell), `round ${p.round}: ${short(p.mean)}${p.std === null ? "" : ` ± ${short(p.std, 3)}`}`,
    `seeds: ${p.values.map((v) => short(v)).join(", ")}`]);
}

// ---- score by budget

const PRICES = { epsilon: "claimed", actual: "actual", with_search: "with search" };

function byBudget(study) {
  const holder = el("div"), cells = study.cells.filter((cell) => cell.final);
  if (!cells.length) return [el("p", {}, "No winner has been confirmed yet.")];
  const draw = () => {
    const price = recall("budget-price"), setting = recall("budget-setting");
    const mine = cells.filter((cell) => cell.setting === setting && shown(cell) && cell[price] !== null);
    holder.replaceChildren(drawn((width) => budgetPanel(study, mine, price, width), { class: "chart wide" }),
      el("p", { class: "note" }, price === "with_search"
        ? study.private ? "ε of publishing the winner of a cell's search." : "ε of publishing all trials of a cell, search included, if each had independent noise (squares of μ add up). Trials that share a seed share their noise, so this is the cost that a private search would have, not a guarantee for this one. Methods that sample rows are left out, because their account is not a single μ."
        : price === "actual" ? "Actual ε of one run, in the release model of the study." : "Claimed ε of one run.",
      " Whiskers: one standard deviation over seeds. ∞: training without noise."));
  };
  const controls = el("div", { class: "controls" }, choice("budget-setting", "Setting", study.settings.map((s) => [s, s]), draw),
    choice("budget-price", "Kind of ε", [["epsilon", "claimed"], ["actual", "actual"], ["with_search", "with search"]], draw));
  draw();
  return [controls, legend(study, keysOf(study), draw), holder];
}

function budgetPanel(study, cells, price, width) {
  const height = Math.round(Math.max(240, Math.min(380, width * 0.5)));
  const at = (cell) => real(cell[price]);
  const finite = extent(cells.map(at)), infinite = cells.some((cell) => at(cell) === Infinity);
  const range = extent(cells.flatMap((cell) => [cell.final.mean - (cell.final.std || 0), cell.final.mean + (cell.final.std || 0)]));
  if (!range || !(finite || infinite)) return el("p", { class: "note" }, "Nothing to show.");
  const domain = finite ? [finite[0] / 1.15, finite[1] * 1.15] : [1, 2], room = infinite ? 60 : 0;
  const log = study.objective.lower && range[0] > 0;
  const { root, sx, sy, inner } = frame({ width, height, label: `${study.objective.final} against ${PRICES[price]} ε`,
    x: { domain, kind: "log", room, label: `ε, ${PRICES[price]} (logarithmic)`,
      ticks: finite ? (price === "with_search" ? logTicks(...domain) : distinct(cells.map(at).filter(isNumber))).filter((v, k, all) => k === 0 || price !== "actual" || v > all[k - 1] * 1.02) : [] },
    y: { domain: log ? [range[0] / 1.1, range[1] * 1.1] : padded(range), kind: log ? "log" : "linear", label: `${study.objective.final}${study.objective.unit}` } });
  const place = (cell) => (at(cell) === Infinity ? inner.right - 20 : sx(at(cell)));
  if (infinite) root.append(svg("text", { class: "tick", x: inner.right - 20, y: inner.bottom + 16, "text-anchor": "middle" }, "∞"));
  const points = [], keys = keysOf(study);
  keys.forEach(({ method, strategy }, number) => {
    const mine = cells.filter((cell) => cell.method === method && cell.strategy === strategy).sort((a, b) => at(a) - at(b));
    if (!mine.length) return;
    const aside = (number - (keys.length - 1) / 2) * Math.min(3, 24 / keys.length), colour = colourOf(study, method, strategy);
    root.append(seriesLine(study, method, strategy, mine.map((cell) => [place(cell) + aside, sy(cell.final.mean)])));
    for (const cell of mine) {
      const x = place(cell) + aside, std = cell.final.std || 0, low = Math.max(cell.final.mean - std, log ? range[0] : -Infinity);
      root.append(svg("line", { class: "whisker", x1: x, x2: x, y1: sy(low), y2: sy(cell.final.mean + std), stroke: colour }),
        mark(markerOf(study, method, strategy), x, sy(cell.final.mean), 4, inked(study, method, strategy)));
      points.push({ x, y: sy(cell.final.mean), cell });
    }
  });
  return cursor(root, points, ({ cell }) => [`${cellName(study, cell)}, ${budget(cell.epsilon)}`,
    `${scored(study, cell.final.mean)}${cell.final.std === null ? "" : ` ± ${scored(study, cell.final.std)}`} over ${cell.final.seeds} seeds`,
    `actual ε ${short(real(cell.actual))}, with search ${short(real(cell.with_search))}`]);
}

// ---- tables

function tables(study) {
  return tablesOf(study, (found) => !["privacy", "timing"].includes(found.kind)); // they have their own sections
}

function tablesOf(study, wanted) {
  return study.tables.filter(wanted).map((found, number) => table({ ...found, name: `${found.kind}-${number}` }));
}

// ---- two studies side by side

function comparison(a, b) {
  if (a.objective.metric !== b.objective.metric) return [el("p", {}, `${a.name} has the objective ${a.objective.title}, ${b.name} has ${b.objective.title}: their scores cannot be compared.`)];
  const alone = a.settings.length === 1 && b.settings.length === 1; // then their names may differ
  const oneStrategy = a.strategies.length === 1 && b.strategies.length === 1;
  const alike = (x, y) => x.method === y.method && real(x.epsilon) === real(y.epsilon) && (oneStrategy || x.strategy === y.strategy) && (alone || x.setting === y.setting);
  const pairs = a.cells.map((x) => [x, b.cells.find((y) => alike(x, y))]).filter(([, y]) => y);
  const lone = [a.cells.filter((x) => !b.cells.some((y) => alike(x, y))).length, b.cells.filter((y) => !a.cells.some((x) => alike(x, y))).length];
  const both = pairs.filter(([x, y]) => x.final && y.final);
  return [
    el("p", {}, `${pairs.length} ${pairs.length === 1 ? "cell is" : "cells are"} in both; ${lone[0]} only in ${a.name}, ${lone[1]} only in ${b.name}.`,
      alone && a.settings[0] !== b.settings[0] ? ` Their settings differ (${a.settings[0]}; ${b.settings[0]}).` : "",
      oneStrategy && a.strategies[0] !== b.strategies[0] ? ` Their search strategies differ (${a.strategies[0]}; ${b.strategies[0]}).` : ""),
    both.length > 0 && [drawn((width) => dumbbells(a, b, both, width), { class: "chart wide" }),
      el("p", { class: "note" }, `Filled marks: ${a.name}. Hollow marks: ${b.name}. Whiskers: one standard deviation over seeds.`)],
    pairs.length > 0 && table({ name: "comparison", title: `${a.objective.final} of ${a.name} and ${b.name}`,
      caption: `Difference: ${b.name} minus ${a.name}. Pairs: runs of both with the same seed; ± is the standard deviation of their differences.`,
      columns: ["Method", "Budget", a.name, b.name, "Difference", "Pairs", `Chosen in ${a.name}`, `Chosen in ${b.name}`], align: "llrrrrpp",
      groups: distinct(pairs.map(([x]) => x.setting)).map((setting, _, all) => ({ heading: all.length > 1 ? setting : "", rows: pairs.filter(([x]) => x.setting === setting).map(([x, y]) => comparedRow(a, x, y)) })) }),
  ];
}

function comparedRow(study, x, y) {
  const last = (run) => run.curves[study.objective.metric]?.at(-1);
  const gaps = x.confirm.flatMap((run) => y.confirm.filter((r) => r.seed === run.seed).map((r) => last(r) - last(run))).filter(isNumber);
  const text = ({ final }) => (final ? `${scored(study, final.mean)}${final.std === null ? "" : ` ± ${scored(study, final.std)}`}` : "–");
  const chosen = (cell) => (cell.chosen ? cell.search.axes.map(({ name }) => `${name} = ${short(cell.chosen[name])}`).join(", ") : "–");
  const gap = x.final && y.final ? y.final.mean - x.final.mean : null;
  const shown = gap === null ? "–" : `${gap > 0 ? "+" : ""}${scored(study, gap)}${gaps.length > 1 ? ` ± ${scored(study, deviation(gaps))}` : ""}`;
  return [cellName(study, x), budget(x.epsilon), text(x), text(y), shown, gaps.length ? String(gaps.length) : "none", chosen(x), chosen(y)];
}

function dumbbells(a, b, pairs, width) {
  const several = distinct(pairs.map(([x]) => x.setting)).length > 1, high = 26, left = Math.min(width * 0.45, 300), top = 6;
  const ends = ({ final }) => [final.mean - (final.std || 0), final.mean + (final.std || 0)];
  const range = extent(pairs.flatMap(([x, y]) => [...ends(x), ...ends(y)]));
  const { root, sx } = frame({ width, height: pairs.length * high + top + 40, left, top, label: `${a.objective.final} of ${a.name} and ${b.name}`,
    x: { domain: padded(range), label: `${a.objective.final}${a.objective.unit}` }, y: { domain: [0, 1], ticks: [], label: "" } });
  const points = [];
  pairs.forEach(([x, y], row) => {
    const middle = top + (row + 0.5) * high, colour = colourOf(a, x.method, x.strategy), name = `${cellName(a, x)}, ${budget(x.epsilon)}${several ? `, ${x.setting}` : ""}`;
    const most = Math.floor(left / 7) - 1;
    root.append(svg("text", { class: "tick", x: left - 8, y: middle + 4, "text-anchor": "end" }, name.length > most ? name.slice(0, most) + "…" : name),
      svg("line", { class: "axis", x1: sx(x.final.mean), x2: sx(y.final.mean), y1: middle, y2: middle }));
    [[a, x, -4], [b, y, 4]].forEach(([study, cell, aside], k) => {
      const [low, top_] = ends(cell);
      root.append(svg("line", { class: "whisker", x1: sx(low), x2: sx(top_), y1: middle + aside, y2: middle + aside, stroke: colour }),
        mark("o", sx(cell.final.mean), middle + aside, 4.2, k ? { fill: "var(--ground)", stroke: colour, "stroke-width": 1.8 } : { fill: colour }));
      points.push({ x: sx(cell.final.mean), y: middle + aside, cell, study, name });
    });
  });
  return cursor(root, points, ({ cell, study, name }) => [name, `${study.name}: ${scored(study, cell.final.mean)}${cell.final.std === null ? "" : ` ± ${scored(study, cell.final.std)}`}`]);
}
