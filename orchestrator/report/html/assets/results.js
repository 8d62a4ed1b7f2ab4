// Results: summary, scores by round and by budget, tables.

const cellName = (study, cell) => (study.strategies.length > 1 ? `${cell.method} (${cell.strategy})` : cell.method);

function keysOf(study) {
  return study.methods.flatMap((method) => study.strategies.map((strategy) => ({ method, strategy, name: cellName(study, { method, strategy }) })));
}

function summary(study) {
  const several = study.findings.length > 1;
  return [
    study.findings.map((part) => [several && el("h3", {}, part.heading),
      el("ul", { class: "findings" }, part.sentences.map((sentence) => el("li", {}, sentence.text))),
      part.baseline && el("p", {}, part.baseline)]),
    !study.findings.length && el("p", {}, "Nothing has been started yet."),
    bestSoFar(study),
    study.findings.some((part) => part.sentences.some((sentence) => sentence.winner)) && note("± is one standard deviation over seeds; ranges are 95% confidence intervals of the difference.", "summary",
      "Differences are paired by seed (t-test). Significance is at 5%, with Holm's correction over the methods at that budget; the tables print the same methods bold."),
    study.caveats.length > 0 && el("div", { class: "caveats" }, el("h3", {}, "Caveats"), el("ul", {}, study.caveats.map((text) => el("li", {}, withCode(text))))),
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
  if (!cells.length) return bestCurves(study);
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
    note(`Lines are means over the confirm seeds; the band is ${BANDS[band]}${traces ? "; thin lines are single seeds" : ""}.`, "curves", "Arrow keys move the cursor of a focused chart."));
  };
  const controls = el("div", { class: "controls" },
    choice("curve-setting", "Setting", study.settings.map((s) => [s, s]), draw),
    choice("curve-metric", "Metric", metrics.map((m) => [m, study.metrics[m]]), draw, study.objective.metric),
    choice("curve-band", "Band", [["deviation", "standard deviation"], ["error", "standard error"], ["none", "none"]], draw),
    choice("curve-rounds", "Rounds", [["linear", "linear"], ["log", "logarithmic"]], draw),
    choice("curve-height", "Vertical range", [["common", "same for all budgets"], ["own", "by budget"]], draw),
    tick("curve-traces", "single seeds", draw));
  draw();
  return [controls, legend(study, keysOf(study), draw), holder, !study.status.finished && [el("h3", {}, "Search so far"), bestCurves(study)]];
}

// While the study runs: the best validation score of every cell by number of ended search trials.
function bestCurves(study) {
  const holder = el("div"), cells = study.cells.filter((cell) => cell.best.length);
  if (!cells.length) return [el("p", {}, study.private ? "No winner has been confirmed yet; a private search shows nothing before." : "No search trial has finished yet.")];
  const draw = () => {
    const mine = cells.filter((cell) => cell.setting === recall("best-setting") && shown(cell));
    const range = extent(mine.flatMap((cell) => cell.best.map(([, score]) => score)));
    const epsilons = study.epsilons.filter((epsilon) => mine.some((cell) => cell.epsilon === epsilon));
    holder.replaceChildren(el("div", { class: "panels" }, epsilons.map((epsilon) => el("figure", {}, el("figcaption", {}, budget(epsilon)),
      drawn((width) => bestPanel(study, mine.filter((cell) => cell.epsilon === epsilon), range, width))))),
    note("The best mean over seeds on the validation rows so far. Test rows are used once a winner is confirmed.", "best"));
  };
  const controls = el("div", { class: "controls" }, choice("best-setting", "Setting", study.settings.map((s) => [s, s]), draw));
  draw();
  return [controls, legend(study, keysOf(study), draw), holder];
}

function bestPanel(study, cells, range, width) {
  const most = Math.max(...cells.map((cell) => cell.search_ended)), log = study.objective.lower && range[0] > 0;
  const { root, sx, sy } = frame({ width, height: 230, label: `Best validation ${study.objective.title} by ended search trials`,
    x: { domain: [0, Math.max(1, most)], whole: true, label: "search trials ended" },
    y: { domain: log ? [range[0] / 1.1, range[1] * 1.1] : padded(range), kind: log ? "log" : "linear", label: `validation ${study.objective.title}${study.objective.unit}` } });
  const points = [];
  for (const cell of cells) {
    const steps = cell.best.flatMap(([n, score], k) => (k ? [[n, cell.best[k - 1][1]], [n, score]] : [[n, score]]));
    steps.push([cell.search_ended, cell.best.at(-1)[1]]);
    root.append(seriesLine(study, cell.method, cell.strategy, steps.map(([n, score]) => [sx(n), sy(score)])));
    for (const [n, score] of cell.best) {
      root.append(mark(markerOf(study, cell.method, cell.strategy), sx(n), sy(score), 3.4, inked(study, cell.method, cell.strategy)));
      points.push({ x: sx(n), y: sy(score), n, score, cell });
    }
  }
  return cursor(root, points, ({ n, score, cell }) => [cellName(study, cell), `${scored(study, score)} after ${n} search trial${n === 1 ? "" : "s"}`]);
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

const PRICE_NOTES = {
  epsilon: "Claimed ε of one run.", actual: "Actual ε of one run, in the release model of the study.",
  with_search: "ε of publishing all trials of a cell, search included, if each had independent noise.", private: "ε of publishing the winner of a cell's search.",
};
const PRICES = { epsilon: "claimed", actual: "actual", with_search: "with search" };

function byBudget(study) {
  const holder = el("div"), cells = study.cells.filter((cell) => cell.final);
  if (!cells.length) return [el("p", {}, "No winner has been confirmed yet.")];
  const draw = () => {
    const price = recall("budget-price"), setting = recall("budget-setting");
    const mine = cells.filter((cell) => cell.setting === setting && shown(cell) && cell[price] !== null);
    holder.replaceChildren(drawn((width) => budgetPanel(study, mine, price, width), { class: "chart wide" }),
      note(`${PRICE_NOTES[price === "with_search" && study.private ? "private" : price]} Whiskers: one standard deviation over seeds.`, "budgets",
        price === "with_search" && !study.private && "Trials that share a seed share their noise, so this is the cost that a private search would have, not a guarantee for this one. Squares of μ add up; methods that sample rows are left out, because their account is not a single μ. ",
        "∞: training without noise."));
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
