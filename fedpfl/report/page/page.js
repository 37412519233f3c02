"use strict";
// Sorts tables, changes between light and dark, and hands plotly the figures that the reader chooses.
(() => {
  const page = document.documentElement;
  window.addEventListener("error", (event) => { page.dataset.error = event.message; });
  const every = (kind) => [...document.querySelectorAll(kind)];

  function make(tag, attributes, ...children) {
    const element = Object.assign(document.createElement(tag), attributes);
    element.append(...children);
    return element;
  }

  // ---- tables: a click on a heading sorts, numbers first from the greatest

  function sortable(table) {
    const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells], body = table.tBodies[0];
    heads.forEach((head, place) => head.querySelector("button").addEventListener("click", () => {
      const numeric = head.classList.contains("number"), before = head.getAttribute("aria-sort");
      const down = before ? before === "ascending" : numeric;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = ({ cells }) => numeric ? Number(cells[place].dataset.value ?? NaN) : cells[place].textContent;
      const order = (a, b) => numeric ? a - b : a.localeCompare(b, "en", { numeric: true });
      body.append(...[...body.rows].map((row) => [key(row), row]).sort(([a], [b]) =>
        // What is not known stands last.
        Number.isNaN(a) || Number.isNaN(b) ? Number.isNaN(a) - Number.isNaN(b) : down ? order(b, a) : order(a, b)
      ).map(([, row]) => row));
    }));
  }
  every("table.sortable").forEach(sortable);

  // ---- charts

  const source = document.getElementById("data"), data = source && JSON.parse(source.textContent);
  const state = { setting: 0, hidden: new Set(data ? data.hidden[0] : []), chosen: {} };
  const probe = make("i", { hidden: true });
  document.body.append(probe);
  function colour(name) { probe.style.color = `var(--${name})`; return getComputedStyle(probe).color; }

  function layout(own, width, boxes) {
    const [ink, quiet, line, paper] = ["ink", "quiet", "line", "paper"].map(colour);
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: quiet, tickfont: { color: quiet }, automargin: true };
    const legend = width < 700 ? { orientation: "h", y: -0.2 } : {};
    const look = { xaxis: axis, yaxis: axis, paper_bgcolor: paper, plot_bgcolor: paper, legend,
      font: { color: ink, family: "system-ui, sans-serif", size: 12 }, hoverlabel: { bgcolor: paper, font: { color: ink } },
      margin: { l: 52, r: 12, t: 26, b: 46 } };
    const box = { boxpoints: "all", jitter: 0.6, pointpos: 0, hoveron: "boxes+points", fillcolor: "rgba(0,0,0,0)",
      line: { color: ink, width: 1.2 }, width: 0.7, marker: { opacity: 0.55 } };
    const heatmap = { colorscale: [[0, colour("heat0")], [1, colour("heat")]], xgap: 0.5, ygap: 0.5 };
    if (own.grid) { // small charts
      const columns = Math.min(own.annotations.length, Math.max(1, Math.floor(width / 230)));
      const rows = Math.ceil(own.annotations.length / columns);
      own = { ...own, grid: { ...own.grid, rows, columns }, height: 60 + 200 * rows };
    }
    if (boxes) own.height = 90 + 46 * boxes;
    return { ...own, template: { layout: look, data: { box: [box], heatmap: [heatmap] } }, width };
  }

  function menus(box, figures) {
    const chosen = state.chosen[box.id] ??= {}, bar = make("div", { className: "controls" });
    for (const name of Object.keys(figures[0].choice)) {
      const options = [...new Set(figures.map(({ choice }) => choice[name]))];
      if (!options.includes(chosen[name])) chosen[name] = options[0];
      figures = figures.filter(({ choice }) => choice[name] === chosen[name]);
      const menu = make("select", { name, onchange: () => {
        chosen[name] = menu.value;
        draw(box);
        box.querySelector(`select[name="${name}"]`).focus({ preventScroll: true });
      } }, ...options.map((text) => make("option", { value: text, selected: text === chosen[name] }, text)));
      bar.append(make("label", {}, `${name} `, options.length > 1 ? menu : options[0]));
    }
    return [bar, figures[0]];
  }

  function draw(box, width) {
    const figures = data.charts[box.id.replace("chart-", "")].filter(({ setting }) => setting === state.setting);
    const plot = box.querySelector(".plot") || make("div", { className: "plot" });
    if (!figures.length || !window.Plotly) {
      const why = figures.length ? "The charts need plotly's script, which was written beside this page." :
        "Nothing to draw for this data set and partition.";
      box.replaceChildren(make("p", { className: "note" }, why));
      return;
    }
    const [bar, figure] = menus(box, figures);
    box.replaceChildren(bar, make("p", { className: "note" }, figure.note || ""), plot);
    // Colours are variables of the style sheet; a copy is coloured, as light and dark take turns.
    const copy = JSON.parse(JSON.stringify(figure), (_, value) => {
      const name = typeof value === "string" && value.match(/^var\(--(\w+)\)$/);
      return name ? colour(name[1]) : value;
    });
    for (const trace of copy.data) {
      for (const key of ["x", "y", "z", "customdata"]) if (typeof trace[key] === "number") trace[key] = data.arrays[trace[key]];
      if (state.hidden.has(trace.meta)) trace.visible = "legendonly";
    }
    const first = !plot.on, boxes = copy.data.filter(({ type, visible }) => type === "box" && !visible).length;
    Plotly.react(plot, copy.data, layout(copy.layout, width || box.clientWidth, boxes), { displayModeBar: false });
    if (!first) return;
    const hide = (change) => (event) => {
      const methods = new Set(event.data.map(({ meta }) => meta));
      change(event.data[event.curveNumber].meta, [...methods]);
      drawAll();
      return false;
    };
    plot.on("plotly_legendclick", hide((method) => { if (!state.hidden.delete(method)) state.hidden.add(method); }));
    plot.on("plotly_legenddoubleclick", hide((method, methods) => {
      const others = methods.filter((one) => one !== method), alone = others.every((one) => state.hidden.has(one));
      state.hidden = new Set(alone ? [] : others);
    }));
  }
  const drawAll = (width) => every(".chart").forEach((box) => draw(box, width));

  const menu = document.getElementById("setting");
  menu?.addEventListener("change", () => {
    state.setting = menu.selectedIndex;
    state.hidden = new Set(data.hidden[state.setting]);
    drawAll();
  });

  // ---- light and dark; paper is light, and narrower

  const button = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)");
  function show(theme, width) {
    if (theme) page.dataset.theme = theme; else delete page.dataset.theme;
    const dark = theme ? theme === "dark" : system.matches;
    button.textContent = dark ? "light" : "dark";
    button.setAttribute("aria-label", `${button.textContent} colours`);
    drawAll(width);
  }
  let chosen;
  button.addEventListener("click", () => { chosen = button.textContent; show(chosen); });
  system.addEventListener("change", () => show(chosen));
  window.addEventListener("beforeprint", () => show("light", 700));
  window.addEventListener("afterprint", () => show(chosen));
  let waiting = 0;
  window.addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(() => drawAll()); });
  button.hidden = false;
  show();
  page.dataset.ready = "yes";
})();
