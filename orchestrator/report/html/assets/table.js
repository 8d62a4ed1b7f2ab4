// A table that can be sorted, filtered and copied as displayed. Rows stay within their groups.

const PAGE_ROWS = 100;

function numeric(text) {
  const found = String(text).replace(/[,†<≤]/g, "").trim();
  if (found.startsWith("∞") || found === "inf") return Infinity;
  const value = parseFloat(found);
  return Number.isNaN(value) ? null : value;
}

function compare(a, b) {
  const x = numeric(a), y = numeric(b);
  if (x !== null && y !== null) return x - y;
  if ((x === null) !== (y === null)) return x === null ? 1 : -1;
  return String(a).localeCompare(String(b));
}

// spec: name, title, caption (its first sentence, then details), columns, align, groups [{heading, rows, bold}], csv
function table(spec) {
  const sort = { column: recall(`sort-${spec.name}`, -1), down: recall(`down-${spec.name}`, false) };
  let limit = PAGE_ROWS;
  const body = el("tbody"), more = el("div", { class: "more" }), count = el("span", { class: "count", "aria-live": "polite" });
  const total = spec.groups.reduce((sum, group) => sum + group.rows.length, 0);

  function visible() {
    const wanted = recall(`filter-${spec.name}`, "").toLowerCase().split(/\s+/).filter(Boolean);
    return spec.groups.map((group) => {
      let rows = group.rows.map((cells, number) => ({ cells, bold: group.bold?.[number] || [] }));
      rows = rows.filter(({ cells }) => {
        const text = `${group.heading} ${cells.join(" ")}`.toLowerCase();
        return wanted.every((word) => text.includes(word));
      });
      if (sort.column >= 0) {
        rows.sort((a, b) => {
          const there = [a, b].map((row) => numeric(row.cells[sort.column]) !== null || spec.align[sort.column] !== "r");
          if (there[0] !== there[1]) return there[0] ? -1 : 1; // missing values stay last in both directions
          return compare(a.cells[sort.column], b.cells[sort.column]) * (sort.down ? -1 : 1);
        });
      }
      return { heading: group.heading, rows };
    }).filter((group) => group.rows.length);
  }

  function draw() {
    const groups = visible(), lines = [];
    let left = limit;
    for (const group of groups) {
      if (left <= 0) break;
      if (group.heading) lines.push(el("tr", { class: "heading" }, el("th", { colspan: spec.columns.length, scope: "rowgroup" }, group.heading)));
      for (const row of group.rows.slice(0, left)) {
        lines.push(el("tr", {}, row.cells.map((text, k) =>
          el(k ? "td" : "th", { class: `to-${spec.align[k]}`, scope: k ? null : "row" }, row.bold[k] ? el("strong", {}, text) : text))));
      }
      left -= group.rows.length;
    }
    body.replaceChildren(...lines);
    const found = groups.reduce((sum, group) => sum + group.rows.length, 0);
    count.textContent = found === total ? `${total} rows` : `${found} of ${total} rows`;
    more.replaceChildren(...(found > limit ? [el("button", { type: "button", onclick: () => { limit += 10 * PAGE_ROWS; draw(); } }, `Show more (${found - limit} left)`)] : []));
  }

  const heads = spec.columns.map((column, k) => {
    const head = el("th", { scope: "col", class: `to-${spec.align[k]}`, "aria-sort": sort.column === k ? (sort.down ? "descending" : "ascending") : "none" });
    head.append(el("button", { type: "button", class: "sort", onclick: () => {
      sort.down = sort.column === k ? !sort.down : false;
      sort.column = k;
      memory.set(`sort-${spec.name}`, k);
      memory.set(`down-${spec.name}`, sort.down);
      heads.forEach((other, n) => other.setAttribute("aria-sort", n === k ? (sort.down ? "descending" : "ascending") : "none"));
      draw();
    } }, column));
    return head;
  });
  const filter = el("input", { type: "search", id: `filter-${spec.name}`, placeholder: "Filter rows", "aria-label": `Filter the rows of ${spec.title}`,
    value: recall(`filter-${spec.name}`, ""), oninput: (event) => { memory.set(`filter-${spec.name}`, event.target.value); draw(); } });
  draw();
  return el("figure", { class: "table", id: `table-${spec.name}` },
    el("figcaption", {}, el("h3", {}, spec.title), spec.caption && note(spec.caption[0], `caption-${spec.name}`, spec.caption.slice(1).join(" "))),
    el("div", { class: "tools" }, total > 4 && filter,
      el("button", { type: "button", onclick: () => copy(toLatex(spec, visible()), "LaTeX") }, "Copy LaTeX"),
      el("button", { type: "button", onclick: () => copy(toCsv(spec, visible()), "CSV") }, "Copy CSV"),
      spec.csv && el("button", { type: "button", title: "The contents of the CSV file in tables/", onclick: () => copy(spec.csv, "Full-precision CSV") }, "Copy CSV (full precision)"), count),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": spec.title }, el("table", {}, el("thead", {}, el("tr", {}, heads)), body)), more);
}

function folded(name, label, ...content) {
  return el("details", { open: recall(`open-${name}`, false), ontoggle: (event) => memory.set(`open-${name}`, event.target.open) },
    el("summary", {}, label), content);
}

// A caption of one or two sentences; the details are folded.
function note(text, name, ...details) {
  const more = details.filter(Boolean);
  return el("div", { class: "note" }, text && el("p", {}, text), more.length > 0 && folded(name, "Details", el("p", {}, more)));
}

// ---- copies

const latexText = (text) => [...String(text)].map((character) => page.latex[character] ?? character).join("");

function toLatex(spec, groups) {
  const line = (cells) => `${cells.join(" & ")} \\\\`;
  const lines = ["% needs \\usepackage{booktabs}", `\\begin{tabular}{${[...spec.align].map((a) => (a === "p" ? "p{3.5cm}" : a)).join("")}}`, "\\toprule",
    line(spec.columns.map(latexText))];
  for (const group of groups) {
    lines.push("\\midrule");
    if (group.heading) lines.push(`\\multicolumn{${spec.columns.length}}{l}{${latexText(group.heading)}} \\\\`);
    for (const row of group.rows) lines.push(line(row.cells.map((text, k) => (row.bold[k] ? `\\textbf{${latexText(text)}}` : latexText(text)))));
  }
  return [...lines, "\\bottomrule", "\\end{tabular}", ""].join("\n");
}

function csvCell(value) {
  let text = String(value);
  if (/^\s*[=+\-@]/.test(text) && Number.isNaN(Number(text))) text = `'${text}`; // a spreadsheet would take it for a formula
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function toCsv(spec, groups) {
  const named = groups.some((group) => group.heading);
  const lines = [[...(named ? ["group"] : []), ...spec.columns]];
  for (const group of groups) for (const row of group.rows) lines.push([...(named ? [group.heading] : []), ...row.cells]);
  return lines.map((cells) => cells.map(csvCell).join(",")).join("\n") + "\n";
}
