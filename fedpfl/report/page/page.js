"use strict";
// Sorts tables, changes between light and dark, and hands plotly the figures that the reader chooses.
(() => {
  const page = document.documentElement, every = (kind) => [...document.querySelectorAll(kind)];
  window.addEventListener("error", (event) => { page.dataset.error = event.message; });

  function make(tag, attributes, ...children) {
    const element = Object.assign(document.createElement(tag), attributes);
    element.append(...children);
    return element;
  }

  // ---- tables: a click on a heading sorts, numbers first from the greatest

  for (const table of every("table.sortable")) {
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

  // ---- charts

  const data = JSON.parse(document.getElementById("data")?.textContent ?? "{}"), chosen = {};
  let hidden = new Set(data.hidden);
  const probe = make("i", { hidden: true });
  document.body.append(probe);

  // Colours are variables of the style sheet; a copy is coloured, as light and dark take turns.
  const coloured = (value) => JSON.parse(JSON.stringify(value), (_, text) => {
    if (typeof text !== "string" || !/^var\(--\w+\)$/.test(text)) return text;
    probe.style.color = text;
    return getComputedStyle(probe).color;
  });

  // A menu for each choice among the figures; what is chosen in one chart holds in all that have it.
  function choose(box, figures) {
    const bar = make("div", { className: "controls" });
    for (const name of Object.keys(figures[0].choice)) {
      const options = [...new Set(figures.map(({ choice }) => choice[name]))];
      const value = options.includes(chosen[name]) ? chosen[name] : options[0];
      figures = figures.filter(({ choice }) => choice[name] === value);
      const menu = make("select", { name, onchange: () => {
        chosen[name] = menu.value;
        drawAll();
        box.querySelector(`select[name="${name}"]`).focus({ preventScroll: true });
      } }, ...options.map((text) => make("option", { value: text, selected: text === value }, text)));
      bar.append(make("label", {}, `${name} `, options.length > 1 ? menu : value));
    }
    return [bar, figures[0]];
  }

  function draw(box, width) {
    if (!window.Plotly) {
      box.replaceChildren(make("p", { className: "note" }, "The charts need plotly's script, written beside this page."));
      return;
    }
    const [bar, figure] = choose(box, data.charts[box.id.replace("chart-", "")]);
    const plot = box.querySelector(".plot") || make("div", { className: "plot" });
    box.replaceChildren(bar, make("p", { className: "note" }, figure.note), plot);
    const { data: traces, layout } = coloured(figure);
    for (const trace of traces) {
      for (const key of ["x", "y", "z", "customdata"]) if (typeof trace[key] === "number") trace[key] = data.arrays[trace[key]];
      if (hidden.has(trace.meta)) trace.visible = "legendonly";
    }
    layout.template = coloured(data.template);
    layout.width = width || box.clientWidth;
    if (layout.width < 700) layout.legend = { orientation: "h", y: -0.2 };
    if (layout.grid) { // small charts
      const count = layout.annotations.length;
      layout.grid.columns = Math.min(count, Math.max(1, Math.floor(layout.width / 230)));
      layout.grid.rows = Math.ceil(count / layout.grid.columns);
      layout.height = 60 + 200 * layout.grid.rows;
    }
    const boxes = traces.filter(({ type, visible }) => type === "box" && !visible).length;
    if (boxes) layout.height = 90 + 46 * boxes;
    const first = !plot.on;
    Plotly.react(plot, traces, layout, { displaylogo: false });
    if (!first) return;
    const click = (change) => ({ data: shown, curveNumber }) => {
      change(shown[curveNumber].meta, shown.map(({ meta }) => meta));
      drawAll();
      return false;
    };
    plot.on("plotly_legendclick", click((method) => { if (!hidden.delete(method)) hidden.add(method); }));
    plot.on("plotly_legenddoubleclick", click((method, methods) => {
      const others = methods.filter((one) => one !== method);
      hidden = new Set(others.every((one) => hidden.has(one)) ? [] : others);
    }));
  }
  const drawAll = (width) => every(".chart").forEach((box) => draw(box, width));

  // ---- light and dark; paper is light, and narrower

  const button = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)");
  let theme;
  function show(shown = theme ?? (system.matches ? "dark" : "light"), width) {
    page.dataset.theme = shown;
    button.textContent = shown === "dark" ? "light" : "dark";
    button.setAttribute("aria-label", `${button.textContent} colours`);
    drawAll(width);
  }
  button.addEventListener("click", () => { theme = button.textContent; show(); });
  system.addEventListener("change", () => show());
  window.addEventListener("beforeprint", () => show("light", 700));
  window.addEventListener("afterprint", () => show());
  let waiting = 0;
  window.addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(() => drawAll()); });
  button.hidden = false;
  show();
  page.dataset.ready = "yes";
})();
