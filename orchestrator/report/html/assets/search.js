// The search: heat maps, parallel coordinates, importance, contest, curves and all configurations. A configuration is
// everything except the seed.

const MOST_LINES = 1500;

function chosenCell(study) {
  const match = (cell) => cell.setting === recall("search-setting") && cell.method === recall("search-method") &&
    String(cell.epsilon) === recall("search-epsilon") && cell.strategy === recall("search-strategy");
  return study.cells.find(match);
}

function search(study) {
  const cells = study.cells.filter((cell) => cell.search.mean.length);
  if (!cells.length) return [el("p", {}, study.private ? "Only the winner of a private search is shown." : "No search trial has finished yet.")];
  const holder = el("div");
  const draw = () => {
    const cell = chosenCell(study);
    if (!cell || !cell.search.mean.length) { holder.replaceChildren(el("p", {}, "No search trial of this cell has finished.")); return; }
    holder.replaceChildren(...[sentence(study, cell), heatMaps(study, cell), parallel(study, cell), importances(cell), contest(study, cell), searchCurves(study, cell), configurations(study, cell)].filter(Boolean));
  };
  const best = cells.find((cell) => cell.method === study.methods.at(-1)) || cells[0];
  const controls = el("div", { class: "controls" },
    choice("search-setting", "Setting", study.settings.map((s) => [s, s]), draw, best.setting),
    choice("search-method", "Method", study.methods.map((m) => [m, m]), draw, cells.toSorted((a, b) => b.search.axes.length - a.search.axes.length)[0].method),
    choice("search-epsilon", "Budget", study.epsilons.map((e) => [e, budget(e)]), draw),
    choice("search-strategy", "Search", study.strategies.map((w) => [w, w]), draw));
  draw();
  return [controls, holder];
}

function sentence(study, cell) {
  const { mean: means, winner, left_out: out, seeds } = cell.search;
  const lost = Object.entries(cell.states).filter(([state]) => state !== "done").map(([state, count]) => `${count} ${state}`);
  return el("p", {}, `${means.length + out} configurations of ${cellName(study, cell)} at ${budget(cell.epsilon)}, `,
    `${Math.max(...seeds) > 1 ? `up to ${Math.max(...seeds)} seeds each` : "one seed each"}${lost.length ? ` (trials: ${lost.join(", ")})` : ""}. `,
    winnerSentence(study, cell),
    out > 0 && ` This page has the best ${means.length}; the ledger has ${out} more.`);
}

// The score that selected the winner, which tables and status show; the score of its search trials differs where a contest followed.
function winnerSentence(study, cell) {
  const { mean: means, winner } = cell.search, score = `validation ${study.objective.title}${study.objective.unit}`;
  if (!isNumber(cell.validation)) return "No winner yet.";
  if (!cell.contest.length) return `The winner's ${score}: ${scored(study, cell.validation)}.`;
  return `The winner's ${score}: ${scored(study, cell.validation)} in the contest${winner === null ? "; the search had not tried it" : `, ${scored(study, means[winner])} in the search`}.`;
}

// ---- heat maps

function heatMaps(study, cell) {
  const names = cell.search.axes.map((axis) => axis.name), key = cell.method;
  if (!names.length) return null;
  const holder = el("div");
  const stages = distinct(cell.search.stages.flat());
  const binned = study.samples_ranges[cell.strategy];
  const draw = () => {
    const x = names.indexOf(recall(`heat-x-${key}`)), y = names.indexOf(recall(`heat-y-${key}`));
    const stage = recall(`heat-stage-${cell.strategy}`), others = recall("heat-others");
    const cells = heatCells(study, cell, x, y === x ? -1 : y, stage, others, binned);
    const panel = (what, title) => el("figure", {}, el("figcaption", {}, title), drawn((width) => heatPanel(study, cell, cells, what, width)));
    const spread = cells.list.some((c) => isNumber(c.std));
    holder.replaceChildren(el("div", { class: "panels two" }, panel("mean", `Validation ${study.objective.title}, mean over seeds`),
      spread ? panel("std", "Standard deviation over seeds") : names.length > 1 && panel("range", "Range over the other hyperparameters")),
    note(`${cell.search.winner === null ? "" : "★ winner. "}× a seed diverged or failed.${names.length > 2 ? ` Each field is the ${others} over all other hyperparameters.` : ""}`, "heat",
      "Dashed frame: the winner lies on that edge, so a better value may lie beyond. ",
      !spread && names.length > 1 && "Each configuration has one seed, so the second map shows the range over the other hyperparameters instead of the standard deviation over seeds."));
  };
  const controls = el("div", { class: "controls" },
    choice(`heat-x-${key}`, "Horizontal", names.map((n) => [n, n]), draw, names[0]),
    choice(`heat-y-${key}`, "Vertical", names.map((n) => [n, n]), draw, names[1] || names[0]),
    choice(`heat-stage-${cell.strategy}`, "Stage", [["all", "all"], ...stages.map((s) => [s, s])], draw, "all"),
    names.length > 2 ? choice("heat-others", "Other hyperparameters", [["best", "best"], ["mean", "mean"]], draw) : null);
  memory.set("heat-others", recall("heat-others", "best"));
  draw();
  return el("section", { class: "sub" }, el("h3", {}, "Heat maps"), controls, holder);
}

function ordered(values, isNumeric) {
  const found = distinct(values);
  return isNumeric ? found.sort((a, b) => a - b) : found;
}

// The values of an axis, or bins of them where values are drawn from a range.
function steps(axis, values, binned) {
  const found = ordered(values, axis.numeric);
  if (!binned || !axis.numeric || found.length <= 12) return { of: (v) => found.indexOf(v), labels: found.map((v) => short(v, 6)) };
  const to = axis.scale === "log" ? Math.log : axis.scale === "complement" ? (v) => -Math.log1p(-v) : (v) => v;
  const [low, high] = extent(found.map(to)), count = 8;
  const back = axis.scale === "log" ? Math.exp : axis.scale === "complement" ? (v) => -Math.expm1(-v) : (v) => v;
  return { of: (v) => Math.min(count - 1, Math.floor(((to(v) - low) / (high - low)) * count)),
    labels: Array.from({ length: count }, (_, k) => short(back(low + ((k + 0.5) / count) * (high - low)), 2)) };
}

function heatCells(study, cell, x, y, stage, others, binned) {
  const { axes, values, mean: means, std, state, stages, winner } = cell.search;
  const keep = means.map((_, k) => k).filter((k) => stage === "all" || stages[k].includes(stage));
  const across = steps(axes[x], keep.map((k) => values[x][k]), binned), down = y < 0 ? null : steps(axes[y], keep.map((k) => values[y][k]), binned);
  const found = new Map();
  for (const k of keep) {
    const column = across.of(values[x][k]), row = down ? down.of(values[y][k]) : 0, name = `${column},${row}`;
    if (!found.has(name)) found.set(name, { column, row, members: [] });
    found.get(name).members.push(k);
  }
  const better = (a, b) => (study.objective.lower ? means[a] - means[b] : means[b] - means[a]);
  const list = [...found.values()].map((c) => {
    const there = c.members.filter((k) => isNumber(means[k])).sort(better);
    const range = extent(there.map((k) => means[k]));
    return { ...c, winner: c.members.includes(winner), lost: c.members.filter((k) => state[k] !== "done").length, best: there[0],
      mean: there.length ? (others === "best" ? means[there[0]] : mean(there.map((k) => means[k]))) : null,
      std: there.length ? (others === "best" ? std[there[0]] : mean(there.map((k) => std[k] ?? NaN))) : null,
      range: there.length > 1 ? range[1] - range[0] : null };
  });
  list.sort((a, b) => a.row - b.row || a.column - b.column);
  return { list, across: across.labels, down: down ? down.labels : [""], xName: axes[x].name, yName: down ? axes[y].name : "" };
}

function heatPanel(study, cell, { list, across, down, xName, yName }, what, width) {
  const longestDown = 7 * Math.max(...down.map((text) => `${text}`.length)); // next to the axis name
  const left = yName ? Math.min(24 + longestDown, width / 3) : 16, wide = (width - left - 10) / across.length, high = Math.max(26, Math.min(44, 300 / down.length));
  const height = high * down.length + 58;
  const range = extent(list.map((c) => c[what]));
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Heat map of ${xName}${yName ? ` and ${yName}` : ""}` });
  const share = (v) => (range[1] === range[0] ? 0.5 : (v - range[0]) / (range[1] - range[0]));
  const flip = what === "mean" && study.objective.lower;
  const points = [], won = list.find((c) => c.winner);
  for (const c of list) {
    const x = left + c.column * wide, y = 6 + (down.length - 1 - c.row) * high;
    if (isNumber(c[what])) {
      const look = heat(flip ? 1 - share(c[what]) : share(c[what]));
      root.append(svg("rect", { x: x + 0.5, y: y + 0.5, width: wide - 1, height: high - 1, fill: look.fill }));
      if (wide > 36) root.append(svg("text", { class: "value", x: x + wide / 2, y: y + high / 2 + 4, "text-anchor": "middle", fill: look.text }, `${c.winner ? "★ " : ""}${short(c[what], 3)}`));
      else if (c.winner) root.append(svg("text", { class: "value", x: x + wide / 2, y: y + high / 2 + 4, "text-anchor": "middle", fill: look.text }, "★"));
    } else {
      root.append(svg("rect", { class: "none", x: x + 0.5, y: y + 0.5, width: wide - 1, height: high - 1 }),
        svg("text", { class: "tick", x: x + wide / 2, y: y + high / 2 + 4, "text-anchor": "middle" }, c.lost ? "×" : c.winner ? "★" : "·"));
    }
    points.push({ x: x + wide / 2, y: y + high / 2, c });
  }
  if (won) edgesOf(won, across, down).forEach(([x, y, w, h]) => root.append(svg("rect", { class: "edge", x: left + x * wide + 1, y: 6 + y * high + 1, width: w * wide - 2, height: h * high - 2 })));
  const longest = 7 * Math.max(...across.map((text) => `${text}`.length)) + 6; // approximate width of the longest label
  const every = Math.ceil(longest / wide);
  across.forEach((text, k) => { if (k % every === 0) root.append(svg("text", { class: "tick", x: left + (k + 0.5) * wide, y: height - 34, "text-anchor": "middle" }, text)); });
  down.forEach((text, k) => root.append(svg("text", { class: "tick", x: left - 5, y: 6 + (down.length - 0.5 - k) * high + 4, "text-anchor": "end" }, text)));
  root.append(svg("text", { class: "label", x: (left + width) / 2, y: height - 12, "text-anchor": "middle" }, xName));
  if (yName) root.append(svg("text", { class: "label", x: 11, y: height / 2 - 20, "text-anchor": "middle", transform: `rotate(-90 11 ${height / 2 - 20})` }, yName));
  return cursor(root, points, ({ c }) => [
    `${xName} = ${across[c.column]}${yName ? `, ${yName} = ${down[c.row]}` : ""}`,
    `mean ${short(c.mean)}${isNumber(c.std) ? ` ± ${short(c.std, 3)} over seeds` : ""}`,
    `${c.members.length} configuration${c.members.length > 1 ? "s" : ""}${c.lost ? `, ${c.lost} diverged or failed` : ""}${isNumber(c.range) ? `, range ${short(c.range, 3)}` : ""}`,
  ], across.length);
}

// The outer rows and columns that contain the winner: column, row from the top, width, height.
function edgesOf(won, across, down) {
  const found = [], rows = down.length, columns = across.length, fromTop = rows - 1 - won.row;
  if (columns > 1 && won.column === 0) found.push([0, 0, 1, rows]);
  if (columns > 1 && won.column === columns - 1) found.push([columns - 1, 0, 1, rows]);
  if (rows > 1 && fromTop === 0) found.push([0, 0, columns, 1]);
  if (rows > 1 && fromTop === rows - 1) found.push([0, rows - 1, columns, 1]);
  return found;
}

// ---- parallel coordinates

function parallel(study, cell) {
  const { axes, mean: means } = cell.search;
  if (axes.length < 2) return null;
  const holder = el("div");
  const draw = () => {
    const done = means.map((_, k) => k).filter((k) => isNumber(means[k])).sort((a, b) => (study.objective.lower ? means[a] - means[b] : means[b] - means[a]));
    const best = done.slice(0, Math.min(MOST_LINES, Math.max(1, Math.ceil(done.length * Number(recall("parallel-share"))))));
    holder.replaceChildren(drawn((width) => parallelPanel(study, cell, best, width), { class: "chart wide" }),
      note(`${best.length} configurations; a stronger line is a better score${cell.search.winner === null ? "" : ", and the winner has its own colour"}.`, "parallel", "Left and right arrow keys step from best to worst."));
  };
  const controls = el("div", { class: "controls" }, choice("parallel-share", "Shown", [["1", "all"], ["0.5", "best 50%"], ["0.1", "best 10%"], ["0.02", "best 2%"]], draw));
  draw();
  return el("section", { class: "sub" }, el("h3", {}, "Parallel coordinates"), controls, holder);
}

function parallelPanel(study, cell, order, width) {
  const { axes, values, mean: means, winner } = cell.search;
  const height = 300, top = 34, bottom = height - 16, narrow = width < 520;
  const columns = [...axes.map((axis, k) => ({ ...axis, values: values[k] })), { name: study.objective.title, numeric: true, scale: "linear", values: means }];
  const at = (k) => 44 + (k * (width - 92)) / (columns.length - 1);
  const scales = columns.map((column) => {
    const there = order.map((k) => column.values[k]);
    if (!column.numeric) { const names = distinct(there); return { y: (v) => bottom - ((names.indexOf(v) + 0.5) / names.length) * (bottom - top), ticks: names }; }
    const kind = column.scale === "names" ? "linear" : column.scale, domain = extent(there) || [0, 1];
    const few = ordered(there, true);
    return { y: scale(domain, [bottom, top], kind), ticks: few.length <= 6 ? few : kind === "log" ? logTicks(...domain).filter((_, k, all) => all.length < 7 || k % 2 === 0) : niceTicks(...domain, 4) };
  });
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Parallel coordinates of ${order.length} configurations` });
  const range = extent(order.map((k) => means[k])), lines = new Map(), points = [];
  for (const k of order.toReversed()) {
    const share = range[1] === range[0] ? 1 : (means[k] - range[0]) / (range[1] - range[0]), good = study.objective.lower ? 1 - share : share;
    const line = svg("path", { class: k === winner ? "strand won" : "strand", d: path(columns.map((c, n) => [at(n), scales[n].y(c.values[k])])), "stroke-opacity": k === winner ? 1 : 0.06 + 0.6 * good ** 3 });
    lines.set(k, line);
    root.append(line);
  }
  if (lines.has(winner)) root.append(lines.get(winner));
  columns.forEach((column, n) => {
    root.append(svg("line", { class: "axis", x1: at(n), x2: at(n), y1: top, y2: bottom }),
      svg("text", { class: "label", x: at(n), y: n % 2 && narrow ? 26 : 13, "text-anchor": n === 0 ? "start" : n === columns.length - 1 ? "end" : "middle", dx: n === 0 ? -36 : n === columns.length - 1 ? 36 : 0 }, column.name));
    for (const value of scales[n].ticks) root.append(svg("text", { class: "tick halo", x: at(n) - 4, y: scales[n].y(value) + 3, "text-anchor": "end" }, short(value, 6)));
  });
  for (const k of order) for (let n = columns.length - 1; n >= 0; n--) if (n === columns.length - 1 || order.length < 400) points.push({ x: at(n), y: scales[n].y(columns[n].values[k]), k, last: n === columns.length - 1 });
  points.sort((a, b) => b.last - a.last);
  let lit = null;
  root.addEventListener("pointed", (event) => {
    lit?.classList.remove("lit");
    lit = event.detail ? lines.get(event.detail.k) : null;
    lit?.classList.add("lit");
  });
  return cursor(root, points, ({ k }) => [`${study.objective.title} ${scored(study, means[k])}`, ...axes.map((axis, n) => `${axis.name} = ${short(values[n][k])}`)]);
}

// ---- importance

function importances(cell) {
  if (!cell.importance.length) return null;
  return el("section", { class: "sub" }, el("h3", {}, "Hyperparameter importance"), el("div", { class: "panels" }, cell.importance.map((found) => {
    const shares = [...Object.entries(found.single), ...Object.entries(found.pairs)].sort((a, b) => b[1] - a[1]).slice(0, 9);
    const higherOrder = 1 - [...Object.values(found.single), ...Object.values(found.pairs)].reduce((sum, v) => sum + v, 0);
    const rows = [...shares, ...(found.exact && higherOrder > 0.005 ? [["higher order", higherOrder]] : [])];
    return el("figure", {}, el("figcaption", {}, `${found.stage}: ${found.n} configurations`), bars(rows.map(([name, value]) => ({ name, value, text: `${(100 * value).toFixed(1)}%` })), "Share of the variance"));
  })), cell.importance.some((found) => found.exact)
    ? note("Share of the variance of the validation scores that a hyperparameter explains alone, or a pair explains beyond both.", "importance",
      "An exact analysis of variance of the grid. A configuration that diverged or failed counts as the worst that finished.")
    : note("Approximate share of the variance of the validation scores that a hyperparameter explains alone; the shares need not add up to 100%.", "importance",
      "These trials are not a grid: values are grouped into five bins of equal counts, and some combinations were tried more often than others."));
}

function bars(rows, label) {
  return drawn((width) => {
    const left = Math.min(width * 0.45, 14 + 7 * Math.max(...rows.map((row) => row.name.length))), high = 24, most = Math.max(1e-12, ...rows.map((row) => row.value));
    const root = svg("svg", { viewBox: `0 0 ${width} ${rows.length * high + 4}`, role: "img", "aria-label": `${label}: ${rows.map((row) => `${row.name} ${row.text}`).join(", ")}` });
    rows.forEach((row, k) => root.append(svg("text", { class: "tick", x: left - 6, y: k * high + 17, "text-anchor": "end" }, row.name.length * 7 > left ? row.name.slice(0, Math.floor(left / 7) - 1) + "…" : row.name),
      svg("rect", { class: "bar", x: left, y: k * high + 4, height: high - 8, width: Math.max(1, ((width - left - 62) * row.value) / most), ...(row.colour ? { style: { fill: row.colour } } : {}) }),
      svg("text", { class: "tick", x: left + Math.max(1, ((width - left - 62) * row.value) / most) + 5, y: k * high + 17 }, row.text)));
    return root;
  }, { class: "chart wide" });
}

// ---- the contest

function contest(study, cell) {
  if (!cell.contest.length) return null;
  const rows = cell.contest.map((c, k) => [`${k + 1}${c.won ? " ★" : ""}`, ...c.values.map((value) => short(value, 6)), scored(study, c.mean), scored(study, c.std), String(c.seeds), c.state]);
  return table({ name: `contest-${cell.method}`, title: "Contest: the best configurations on fresh seeds",
    caption: ["Ranked by mean validation score over the contest seeds, which the search did not use.", `The winner (★) is the best mean${cell.steady ? ", or a mean within one paired standard error of it with a smaller standard deviation" : ""}.`],
    columns: ["Rank", ...cell.search.axes.map((axis) => axis.name), `Validation${study.objective.unit}`, "Std. dev.", "Seeds", "State"],
    align: `r${cell.search.axes.map((axis) => (axis.numeric ? "r" : "l")).join("")}rrrl`, groups: [{ heading: "", rows }] });
}

// ---- validation curves of the best

function searchCurves(study, cell) {
  const metric = study.objective.metric, traces = cell.search.traces.filter((trace) => trace.curves[metric]);
  if (!traces.length) return null;
  const count = distinct(traces.map((trace) => trace.configuration)).length;
  return el("section", { class: "sub" }, el("h3", {}, "Validation curves of the best configurations"), drawn((width) => {
    const range = extent(traces.flatMap((trace) => trace.curves[metric])), log = study.objective.lower && range[0] > 0;
    const { root, sx, sy } = frame({ width, height: 260, label: `Validation curves of ${count} configurations`,
      x: { domain: extent(traces.flatMap((trace) => trace.rounds)), whole: true, label: "round" },
      y: { domain: log ? range : padded(range), kind: log ? "log" : "linear", label: `validation ${study.objective.title}` } });
    const points = [];
    for (const trace of traces.toReversed()) {
      const line = trace.rounds.map((t, k) => [t, trace.curves[metric][k]]).filter(([, v]) => isNumber(v));
      const won = trace.configuration === cell.search.winner;
      root.append(svg("path", { class: won ? "trace won" : "trace", d: path(line.map(([t, v]) => [sx(t), sy(v)])), stroke: "currentColor" }));
      if (line.length === 1) root.append(mark("o", sx(line[0][0]), sy(line[0][1]), 3, { fill: won ? "var(--series-1)" : "currentColor", "fill-opacity": won ? 1 : 0.4 }));
      for (const [t, v] of line) points.push({ x: sx(t), y: sy(v), t, v, trace, won });
    }
    return cursor(root, points, ({ t, v, trace, won }) => [`${won ? "the winner, " : ""}seed ${trace.seed}, round ${t}: ${scored(study, v)}`,
      ...cell.search.axes.map((axis, n) => `${axis.name} = ${short(cell.search.values[n][trace.configuration])}`)]);
  }, { class: "chart wide" }), note(`The ${count} best configurations on the validation rows, one line per seed${traces.some((trace) => trace.configuration === cell.search.winner) ? "; the winner is coloured" : ""}.`));
}

// ---- every configuration

function configurations(study, cell) {
  const { axes, values, stages, state, mean: means, std, seeds, seconds, winner } = cell.search;
  const order = means.map((_, k) => k).sort((a, b) => (isNumber(means[b]) - isNumber(means[a])) || (study.objective.lower ? means[a] - means[b] : means[b] - means[a]));
  const rows = order.map((k, rank) => [`${rank + 1}${k === winner ? " ★" : ""}`, ...axes.map((_, n) => short(values[n][k], 6)), stages[k].join(", "), scored(study, means[k]), scored(study, std[k]), String(seeds[k]), state[k], short(seconds[k], 3)]);
  return table({ name: `configurations-${cell.method}`, title: `All configurations of ${cellName(study, cell)} at ${budget(cell.epsilon)}`,
    caption: ["Ranked by mean validation score over the search seeds.", "A configuration with a diverged or failed seed has no mean. Seconds: the shares of its trials in the time of their packs."],
    columns: ["Rank", ...axes.map((axis) => axis.name), "Stage", `Validation${study.objective.unit}`, "Std. dev.", "Seeds", "State", "Seconds"],
    align: `r${axes.map((axis) => (axis.numeric ? "r" : "l")).join("")}lrrrlr`, groups: [{ heading: "", rows }] });
}
