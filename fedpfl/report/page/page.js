"use strict";
// Sorts tables, and hands plotly the figures that the reader chooses.
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

  // ---- charts: a menu for each choice among the figures; a choice holds in all charts that have it

  const data = JSON.parse(document.getElementById("data")?.textContent ?? "{}"), chosen = {};

  function draw(box) {
    if (!window.Plotly) {
      box.replaceChildren(make("p", { className: "note" }, "The charts need plotly's script, written beside this page."));
      return;
    }
    let charts = data[box.id.replace("chart-", "")];
    const bar = make("div", { className: "controls" });
    for (const name of Object.keys(charts[0].choice)) {
      const options = [...new Set(charts.map(({ choice }) => choice[name]))];
      const value = options.includes(chosen[name]) ? chosen[name] : options[0];
      charts = charts.filter(({ choice }) => choice[name] === value);
      const menu = make("select", { name, onchange: () => {
        chosen[name] = menu.value;
        every(".chart").forEach(draw);
        box.querySelector(`select[name="${name}"]`).focus({ preventScroll: true });
      } }, ...options.map((text) => make("option", { value: text, selected: text === value }, text)));
      bar.append(make("label", {}, `${name} `, options.length > 1 ? menu : value));
    }
    const plot = box.querySelector(".plot") || make("div", { className: "plot" });
    box.replaceChildren(bar, plot);
    const { data: traces, layout } = structuredClone(charts[0]);
    layout.template = data.template;
    Plotly.react(plot, traces, layout, { displaylogo: false, responsive: true });
  }

  every(".chart").forEach(draw);
  page.dataset.ready = "yes";
})();
