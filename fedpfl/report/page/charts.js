"use strict";
// Draws the charts from the JSON in #data. Text goes in as text nodes only, never as markup.
(() => {
  const page = document.documentElement;
  window.addEventListener("error", (event) => { page.dataset.error = event.message; });

  const data = JSON.parse(document.getElementById("data").textContent);
  const state = { setting: 0, hidden: new Set(), metric: null, across: "round", smooth: true, zoom: null, zoomed: null,
    judged: "accuracy", baseline: null, partition: 0, order: "id", mask: 0, scale: "share", cost: "down", open: new Set() };
  const COLORS = 8;
  const DASHES = ["", "7 3", "2 2.5", "8 3 2 3", "5 2 1.5 2 1.5 2"];
  const LEGEND = 14, BEST = 10; // with more methods than LEGEND only the BEST are shown at first
  const LEVELS = 16;

  // ---- elements and numbers

  function make(space, tag, attributes, children) {
    const element = space ? document.createElementNS(space, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return element;
  }
  const html = (tag, attributes, ...children) => make(null, tag, attributes, children);
  const svg = (tag, attributes, ...children) => make("http://www.w3.org/2000/svg", tag, attributes, children);
  const label = (x, y, text, anchor, kind) => svg("text", { x: point(x), y: point(y), "text-anchor": anchor, class: kind }, text);
  const tell = (head, ...lines) => [html("strong", {}, head), ...lines.map((line) => html("div", {}, line))];
  const known = (value) => typeof value === "number" && Number.isFinite(value);
  const point = (value) => Math.round(value * 10) / 10;
  const path = (points) => points.length ? "M" + points.map(([x, y]) => `${point(x)} ${point(y)}`).join("L") : "";
  const cut = (text, most) => text.length > most ? `${text.slice(0, most - 1)}…` : text;
  const nearest = (items, distance) => items.reduce((best, item) => best === null || distance(item) < distance(best) ? item : best, null);
  const isLoss = (metric) => metric.endsWith("loss");

  function short(value) {
    if (!known(value)) return "";
    const size = Math.abs(value);
    for (const [unit, scale] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
      if (size >= scale * 10 || (size >= scale && unit !== "k")) return `${+(value / scale).toPrecision(3)}${unit}`;
    }
    return size >= 1000 ? String(Math.round(value)) : String(+value.toPrecision(3));
  }
  const measured = (metric, value) => !known(value) ? "" : isLoss(metric) ? String(+value.toPrecision(3)) : value.toFixed(2);

  function ticks(low, high, count) {
    const raw = (high - low) / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999);
    const found = [];
    for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place++) found.push(+(place * step).toPrecision(12));
    return found;
  }
  function logTicks(low, high, most) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      for (const factor of [1, 2, 5]) found.push(+(factor * 10 ** power).toPrecision(3));
    }
    const inside = found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
    return inside.length > most ? inside.filter((value) => /^1/.test(value.toExponential())) : inside;
  }
  function quantile(sorted, share) {
    const place = share * (sorted.length - 1), under = Math.floor(place);
    return sorted[under] + (sorted[Math.min(under + 1, sorted.length - 1)] - sorted[under]) * (place - under);
  }
  const extent = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

  // ---- looks: a method has the same colour, dash and sign everywhere

  const color = (method) => `k${method % COLORS}`;
  const dash = (method) => DASHES[method % DASHES.length];
  const SIGNS = [
    (x, y, r) => `M${point(x - r)} ${point(y)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`,
    (x, y, r) => `M${point(x - r)} ${point(y - r)}h${2 * r}v${2 * r}h${-2 * r}z`,
    (x, y, r) => `M${point(x)} ${point(y - 1.2 * r)}l${1.2 * r} ${2 * r}h${-2.4 * r}z`,
    (x, y, r) => `M${point(x)} ${point(y - 1.3 * r)}l${1.3 * r} ${1.3 * r}l${-1.3 * r} ${1.3 * r}l${-1.3 * r} ${-1.3 * r}z`,
    (x, y, r) => `M${point(x)} ${point(y + 1.2 * r)}l${1.2 * r} ${-2 * r}h${-2.4 * r}z`,
    (x, y, r) => `M${point(x - r)} ${point(y)}h${2 * r}M${point(x)} ${point(y - r)}v${2 * r}`,
    (x, y, r) => `M${point(x - r)} ${point(y - r)}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}`,
  ];
  const sign = (method, x, y, r) => SIGNS[method % SIGNS.length](x, y, r);
  const full = (method) => (Math.floor(method / SIGNS.length) % 2 ? "sign" : "sign full");

  function sample(method) {
    return svg("svg", { width: 34, height: 12, "aria-hidden": "true", class: color(method) },
      svg("path", { class: "curve", d: "M1 6H33", "stroke-dasharray": dash(method) }),
      svg("path", { class: full(method), d: sign(method, 17, 6, 3.2) }));
  }

  // ---- what is shown

  const name = (group) => data.methods[group.method];
  const inSetting = () => data.groups.filter((group) => group.setting === state.setting);
  const visible = () => inSetting().filter((group) => !state.hidden.has(group.method));
  const byAccuracy = (groups) => [...groups].sort((a, b) => (b.accuracy ?? -1) - (a.accuracy ?? -1));

  function showBest() {
    state.hidden = new Set(byAccuracy(inSetting()).slice(BEST).map((group) => group.method));
  }

  function highlight(method) {
    document.body.classList.toggle("highlight", method !== null);
    for (const element of document.querySelectorAll(".series")) element.classList.toggle("on", Number(element.dataset.method) === method);
  }
  const series = (group, ...children) => svg("g", { class: `series ${color(group.method)}`, "data-method": group.method }, ...children);

  // ---- tooltip

  const tip = html("div", { id: "tip", role: "status", hidden: true });
  document.body.append(tip);
  function showTip(x, y, ...content) {
    tip.replaceChildren(...content);
    tip.hidden = false;
    const width = tip.offsetWidth, height = tip.offsetHeight;
    tip.style.left = `${Math.max(8, x + 16 + width > page.clientWidth ? x - width - 16 : x + 16)}px`;
    tip.style.top = `${Math.max(8, Math.min(window.innerHeight - height - 8, y - height / 2))}px`;
  }
  function hideTip() { tip.hidden = true; }
  document.addEventListener("scroll", hideTip, { passive: true });

  // ---- pieces of charts

  // Draws again without taking the focus away from who works by keyboard.
  function again() {
    const active = document.activeElement, box = active && active.closest(".chart"), kinds = "button, select, input";
    const place = box ? [...box.querySelectorAll(kinds)].indexOf(active) : -1;
    draw();
    const same = place < 0 ? null : box.querySelectorAll(kinds)[place];
    if (same) same.focus({ preventScroll: true });
  }

  const controls = (...parts) => html("div", { class: "controls" }, ...parts);
  function choice(title, options, key) {
    return html("div", { class: "choice", role: "group", "aria-label": title }, options.map(([value, text]) =>
      html("button", { type: "button", "aria-pressed": String(state[key] === value), onclick: () => { state[key] = value; again(); } }, text)));
  }
  function select(title, options, key) {
    const menu = html("select", { onchange: () => { state[key] = options[menu.selectedIndex][0]; again(); } },
      options.map(([value, text]) => html("option", { selected: state[key] === value }, text)));
    return html("label", {}, title, menu);
  }
  function tick(title, key, checked) {
    const box = html("input", { type: "checkbox", onchange: () => { state[key] = box.checked; again(); } });
    box.checked = checked;
    return html("label", {}, box, title);
  }
  const quiet = (text) => html("p", { class: "note" }, text);

  // A table of what a chart shows; filled when it is opened.
  function numbers(key, heads, rows) {
    const details = html("details", { open: state.open.has(key), ontoggle: () => {
      if (details.open) state.open.add(key); else state.open.delete(key);
      if (details.children.length > 1) return;
      const tallness = rows.length > 24 ? "scroll tall" : "scroll";
      details.append(html("div", { class: tallness, tabindex: 0 }, html("table", {},
        html("thead", {}, html("tr", {}, heads.map((text, place) => html("th", { scope: "col", class: place ? "number" : null }, text)))),
        html("tbody", {}, rows.map((row) => html("tr", {}, row.map((text, place) =>
          place ? html("td", { class: "number" }, String(text)) : html("th", { scope: "row" }, String(text)))))))));
    } }, html("summary", {}, "numbers"));
    return details;
  }

  let plots = 0;
  // Axes. x, y: {low, high, log, label, ticks}; returns the drawing, scales and a clipped layer.
  function plot(width, height, title, x, y, margin) {
    const edge = { left: 46, right: 12, top: 22, bottom: 36, ...margin };
    const inner = { width: width - edge.left - edge.right, height: height - edge.top - edge.bottom };
    const scale = (axis, from, to) => {
      const map = axis.log ? Math.log10 : (value) => value;
      const low = map(axis.low), span = map(axis.high) - low || 1;
      return (value) => from + (map(value) - low) / span * (to - from);
    };
    const sx = scale(x, edge.left, edge.left + inner.width), sy = scale(y, edge.top + inner.height, edge.top);
    const drawing = svg("svg", { width, height, role: "img", "aria-label": title });
    const clip = `clip${++plots}`;
    drawing.append(svg("defs", {}, svg("clipPath", { id: clip },
      svg("rect", { x: edge.left - 5, y: edge.top - 5, width: inner.width + 10, height: inner.height + 10 }))));
    const marks = (axis, room, gap) => axis.ticks || (axis.log ? logTicks(axis.low, axis.high, room / gap) : ticks(axis.low, axis.high, room / gap));
    const size = margin && margin.small ? "small" : null, bottom = edge.top + inner.height;
    for (const value of marks(y, inner.height, 44)) {
      drawing.append(svg("path", { class: "gridline", d: `M${edge.left} ${point(sy(value))}h${inner.width}` }),
        label(edge.left - 7, sy(value) + 4, short(value), "end", size));
    }
    for (const value of marks(x, inner.width, 76)) {
      drawing.append(svg("path", { class: "gridline", d: `M${point(sx(value))} ${bottom}v5` }),
        label(sx(value), bottom + 18, short(value), "middle", size));
    }
    drawing.append(svg("path", { class: "axis", d: `M${edge.left} ${bottom}h${inner.width}` }));
    if (y.label) drawing.append(label(2, 12, y.label, null, "strong"));
    if (x.label) drawing.append(label(edge.left + inner.width, height - 3, x.label, "end", "strong"));
    const layer = svg("g", { "clip-path": `url(#${clip})` });
    drawing.append(layer);
    return { drawing, layer, sx, sy, edge, ...inner };
  }

  function pointer(drawing, move) {
    const at = (event) => {
      const box = drawing.getBoundingClientRect();
      move(event.clientX - box.left, event.clientY - box.top, event.clientX, event.clientY);
    };
    const leave = () => { hideTip(); move(null); };
    drawing.addEventListener("pointermove", at);
    drawing.addEventListener("pointerdown", at);
    drawing.addEventListener("pointerleave", leave);
  }

  // The item that is drawn nearest to the pointer, if it is no farther away than this.
  function hit(items, px, py, reach) {
    const item = px === null ? null : nearest(items, ({ x, y }) => Math.hypot(x - px, y - py));
    return item && Math.hypot(item.x - px, item.y - py) < reach ? item : null;
  }

  // Cells as one path per level of darkness; value(row, column) is 0 to 1, or null for nothing.
  function heat(width, title, rows, columns, value, told, options) {
    const { left, letters } = heatLeft(rows, width), top = options.yLabel ? 20 : 4;
    const tall = options.cell || Math.max(4, Math.min(24, 420 / rows.length));
    const room = width - left - 4, wide = room / columns.length, gap = wide > 5 && tall > 5 ? 1 : 0;
    const height = top + tall * rows.length + 36;
    const drawing = svg("svg", { width, height, role: "img", "aria-label": title });
    const levels = Array.from({ length: LEVELS }, () => []);
    const x = (column) => left + column * wide, y = (row) => top + row * tall;
    rows.forEach((text, row) => {
      columns.forEach((_, column) => {
        const share = value(row, column);
        if (share === null) return;
        const level = Math.max(0, Math.min(LEVELS - 1, Math.ceil(share * LEVELS) - 1));
        levels[level].push(`M${point(x(column))} ${point(y(row))}h${point(wide - gap)}v${point(tall - gap)}h${-point(wide - gap)}z`);
      });
      if (tall >= 11 || row % Math.ceil(12 / tall) === 0) {
        const end = text.length > letters ? `…${text.slice(text.length - letters + 1)}` : text;
        drawing.append(label(left - 6, y(row) + tall / 2 + 4, end, "end", "small"));
      }
    });
    drawing.append(svg("rect", { class: "frame", x: left - 0.5, y: top - 0.5, width: point(room + 1), height: point(tall * rows.length + 1) }));
    levels.forEach((cells, level) => {
      if (cells.length) drawing.append(svg("path", { class: "heat", "fill-opacity": shade(level), d: cells.join("") }));
    });
    const step = Math.max(1, Math.ceil(46 / wide));
    columns.forEach((text, column) => {
      if (column % step === 0) drawing.append(label(x(column) + wide / 2, top + tall * rows.length + 16, text, "middle", "small"));
    });
    drawing.append(label(left + room, height - 4, options.xLabel, "end", "strong"));
    if (options.yLabel) drawing.append(label(2, 12, options.yLabel, null, "strong"));
    const ring = svg("rect", { class: "ring", visibility: "hidden", width: point(wide), height: point(tall) });
    drawing.append(ring);
    pointer(drawing, (px, py, cx, cy) => {
      const column = px === null ? -1 : Math.floor((px - left) / wide), row = px === null ? -1 : Math.floor((py - top) / tall);
      const inside = column >= 0 && column < columns.length && row >= 0 && row < rows.length;
      ring.setAttribute("visibility", inside ? "visible" : "hidden");
      if (!inside) return hideTip();
      ring.setAttribute("x", point(x(column)));
      ring.setAttribute("y", point(y(row)));
      showTip(cx, cy, ...told(row, column));
    });
    return drawing;
  }
  const shade = (level) => (0.06 + 0.94 * (level + 1) / LEVELS).toFixed(3);

  function heatLeft(rows, width) {
    const letters = Math.min(Math.max(...rows.map((text) => text.length)), Math.floor(width * 0.3 / 6.4));
    return { letters, left: Math.max(26, letters * 6.4 + 12) };
  }

  // The heat map's scale: the values at its ends and in between.
  function heatScale(texts) {
    const wide = 12;
    const drawing = svg("svg", { width: wide * LEVELS + 40, height: 30, role: "img", "aria-label": `scale from ${texts[0]} to ${texts[texts.length - 1]}` });
    for (let level = 0; level < LEVELS; level++) {
      drawing.append(svg("rect", { class: "heat", x: 20 + level * wide, y: 0, width: wide, height: 10, "fill-opacity": shade(level) }));
    }
    texts.forEach((text, place) => drawing.append(label(20 + wide * LEVELS * place / (texts.length - 1), 24, text, "middle", "small")));
    return drawing;
  }

  function legend(groups, value, digits) {
    const shown = groups.map((group) => [group, value(group)]);
    shown.sort((a, b) => (known(b[1]) ? b[1] : -Infinity) - (known(a[1]) ? a[1] : -Infinity));
    if (digits.ascending) shown.reverse();
    const press = (change) => () => { change(); highlight(null); again(); };
    const buttons = [["all", () => state.hidden.clear()], ["none", () => groups.forEach((group) => state.hidden.add(group.method))]];
    if (groups.length > BEST) buttons.push([`best ${BEST}`, showBest]);
    const hidden = groups.filter((group) => state.hidden.has(group.method)).length;
    return html("div", { class: "legend" },
      groups.length > 1 ? html("div", { class: "all" }, buttons.map(([text, change]) => html("button", { type: "button", onclick: press(change) }, text)),
        hidden ? html("small", {}, `${hidden} of ${groups.length} hidden`) : null) : null,
      html("ul", {}, shown.map(([group, amount]) => {
        const toggle = press(() => { if (!state.hidden.delete(group.method)) state.hidden.add(group.method); });
        const unfinished = group.status.startsWith("finished") ? null : html("small", {}, ` ${group.status}`);
        return html("li", {}, html("button", { type: "button", "aria-pressed": String(!state.hidden.has(group.method)), onclick: toggle,
          onpointerenter: () => highlight(state.hidden.has(group.method) ? null : group.method), onpointerleave: () => highlight(null) },
        html("span", {}, sample(group.method)), html("span", {}, name(group), unfinished), html("span", {}, digits.show(amount))));
      })));
  }

  // ---- convergence

  const ACROSS = { round: "round", down: "GB down, all clients", both: "GB down and up, all clients", hours: "hours of training" };

  function reached(group, kind, round) {
    if (kind === "round") return round;
    const { cost } = group, rounds = cost.round;
    const amounts = kind === "both" ? (cost.down && cost.up ? cost.down.map((value, place) => value + cost.up[place]) : null) : cost[kind];
    if (!amounts) return null;
    let above = rounds.findIndex((number) => number >= round);
    if (above < 0) above = rounds.length - 1;
    const under = above ? rounds[above - 1] : 0, start = above ? amounts[above - 1] : 0;
    const share = rounds[above] === under ? 1 : Math.min(1, (round - under) / (rounds[above] - under));
    return start + (amounts[above] - start) * share;
  }

  function running(values, window) {
    return values.map((_, place) => {
      const part = values.slice(Math.max(0, place - window + 1), place + 1).filter(known);
      return part.length ? part.reduce((sum, value) => sum + value, 0) / part.length : null;
    });
  }

  function drawCurves(box) {
    const metrics = Object.entries(data.metrics);
    const all = inSetting();
    const metric = state.metric, every = /^(cohort_|train_)/.test(metric);
    const drawable = all.filter((group) => group.curves[metric]).map((group) => {
      let [rounds, means, spread, size] = group.curves[metric];
      const window = every && state.smooth ? Math.max(1, Math.round(rounds.length / 20)) : 1;
      if (window > 1) { means = running(means, window); spread = 0; }
      const xs = rounds.map((round) => reached(group, state.across, round));
      const points = rounds.map((round, place) => ({ round, x: xs[place], y: means[place], spread: spread ? spread[place] : null }))
        .filter(({ x, y }) => known(x) && known(y));
      return { group, points, size: size * window };
    }).filter(({ points }) => points.length);
    const lines = drawable.filter(({ group }) => !state.hidden.has(group.method));

    const axes = Object.entries(ACROSS).filter(([kind]) => all.some((group) => known(reached(group, kind, 1))));
    const bar = controls(select("what", metrics, "metric"), select("over", axes, "across"));
    const values = lines.flatMap(({ points }) => points.flatMap(({ y, spread }) => [y - (spread || 0), y + (spread || 0)]));
    let [low, high] = values.length ? extent(values) : [0, 1];
    const [first, end] = lines.length ? extent(lines.flatMap(({ points }) => points.map(({ x }) => x))) : [0, 1];
    const late = lines.flatMap(({ points }) => points.filter(({ x }) => x >= end / 3)).flatMap(({ y, spread }) => [y - (spread || 0), y + (spread || 0)]);
    const [lateLow, lateHigh] = late.length ? extent(late) : [low, high];
    const helps = lateHigh - lateLow < 0.5 * (high - low) && lines.some(({ points }) => points.length > 3);
    if (state.zoomed !== metric) Object.assign(state, { zoom: null, zoomed: metric });
    const zoom = helps && (state.zoom ?? true);
    if (zoom) [low, high] = [lateLow, lateHigh];
    if (helps) bar.append(tick("zoom in on the last two thirds", "zoom", zoom));
    if (every) bar.append(tick("running mean", "smooth", state.smooth));
    const pad = (high - low) * 0.05 || Math.abs(high) * 0.02 || 1;
    low -= pad; high += pad;
    if (!isLoss(metric)) { low = Math.max(0, low); high = Math.min(100, high); if (high - low < 0.2) low = Math.max(0, high - 1); }

    const area = html("div", {});
    const last = (group) => { const line = drawable.find((one) => one.group === group); return line ? line.points[line.points.length - 1].y : null; };
    const scrolled = box.querySelector(".legend") ? box.querySelector(".legend").scrollTop : 0;
    const side = legend(all, last, { show: (value) => measured(metric, value), ascending: isLoss(metric) });
    box.replaceChildren(bar, html("div", { class: "beside" }, area, side));
    side.scrollTop = scrolled;
    if (!lines.length) { area.append(quiet("Nothing to draw: no method shown has this.")); return; }
    const unit = isLoss(metric) ? "nats" : "%";
    const chart = plot(area.clientWidth, Math.min(460, Math.max(300, area.clientWidth * 0.55)), `${data.metrics[metric]} over ${ACROSS[state.across]}, a line per method; numbers in the table below`,
      { low: Math.min(0, first), high: end > 0 ? end : 1, label: ACROSS[state.across] }, { low, high, label: `${data.metrics[metric]} (${unit})` });
    for (const { group, points } of lines) {
      const at = points.map(({ x, y }) => [chart.sx(x), chart.sy(y)]);
      const spread = points.filter((item) => known(item.spread));
      const band = spread.length > 1 ? svg("path", { class: "band", d: path([...spread.map(({ x, y, spread: s }) => [chart.sx(x), chart.sy(y + s)]),
        ...spread.reverse().map(({ x, y, spread: s }) => [chart.sx(x), chart.sy(y - s)])]) + "z" }) : null;
      const step = Math.max(1, Math.round(at.length / 10));
      const signs = at.filter((_, place) => at.length <= 12 || (place + group.method) % step === 0);
      chart.layer.append(series(group, band, svg("path", { class: "curve", d: path(at), "stroke-dasharray": dash(group.method) }),
        svg("path", { class: full(group.method), d: signs.map(([x, y]) => sign(group.method, x, y, 3.4)).join("") })));
    }
    const cursor = svg("path", { class: "cursor", visibility: "hidden" });
    chart.layer.append(cursor);
    const size = Math.max(...lines.map((line) => line.size));
    const stops = [...new Set(lines.flatMap(({ points }) => points.map(({ x }) => x)))].sort((a, b) => a - b);
    let stop = -1;
    function tellAt(px, py, cx, cy) {
      const x = nearest(stops, (value) => Math.abs(chart.sx(value) - px));
      stop = stops.indexOf(x);
      cursor.setAttribute("d", `M${point(chart.sx(x))} ${chart.edge.top}v${chart.height}`);
      cursor.setAttribute("visibility", "visible");
      const rows = lines.map(({ group, points }) => {
        const near = nearest(points, (item) => Math.abs(item.x - x));
        return { group, near, off: Math.abs(chart.sx(near.x) - chart.sx(x)), away: py === null ? Infinity : Math.abs(chart.sy(near.y) - py) };
      }).filter(({ off }) => off < 12).sort((a, b) => (isLoss(metric) ? 1 : -1) * (a.near.y - b.near.y));
      if (!rows.length) return;
      const first = nearest(rows, ({ away }) => away), chosen = first.away < 14 ? first.group : null;
      const start = Math.max(0, Math.min(rows.indexOf(first) - 7, rows.length - 15));
      const told = rows.slice(start, start + 15);
      highlight(chosen && chosen.method);
      const head = state.across === "round" ? `round ${short(x)}` : `${ACROSS[state.across]}: ${short(x)}`;
      showTip(cx, cy, html("strong", {}, size > 1 ? `${head}, mean of ${size} rounds` : head),
        html("table", {}, html("tbody", {}, told.map(({ group, near }) => html("tr", { class: group === chosen ? "near" : null },
          html("td", {}, sample(group.method)), html("th", {}, name(group)),
          html("td", {}, measured(metric, near.y) + (known(near.spread) ? ` ± ${measured(metric, near.spread)}` : "")))))),
        rows.length > told.length ? html("small", {}, `${rows.length - told.length} more`) : "");
    }
    pointer(chart.drawing, (px, py, cx, cy) => {
      if (px === null) { cursor.setAttribute("visibility", "hidden"); highlight(null); return; }
      tellAt(px, py, cx, cy);
    });
    chart.drawing.setAttribute("tabindex", 0);
    chart.drawing.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      event.preventDefault();
      const next = Math.max(0, Math.min(stops.length - 1, stop + (event.key === "ArrowRight" ? 1 : -1)));
      const frame = chart.drawing.getBoundingClientRect();
      tellAt(chart.sx(stops[next]), null, frame.left + chart.sx(stops[next]), frame.top + 80);
    });
    chart.drawing.addEventListener("blur", hideTip);
    area.append(chart.drawing);
    const lost = lines.filter(({ points }) => points.every(({ y }) => y < low || y > high));
    if (lost.length) area.append(quiet(`Out of the picture while zoomed in: ${lost.map(({ group }) => name(group)).join(", ")}.`));
    if (size > 1) area.append(quiet(`Each point is a mean of ${size} rounds.`));
    const longest = nearest(lines, ({ points }) => -points.length).points.map(({ round }) => round);
    const chosen = longest.filter((_, place) => longest.length <= 12 || place === longest.length - 1 || place % Math.ceil(longest.length / 11) === 0);
    area.append(numbers("curves", ["round", ...chosen.map(short)], lines.map(({ group, points }) => [name(group),
      ...chosen.map((round) => { const item = points.find((one) => one.round === round); return item ? measured(metric, item.y) : ""; })])));
  }

  // ---- clients

  const FINETUNED = { accuracy: "before fine-tuning", ft_accuracy: "fine-tuned" };
  function dotsOf(group) {
    const column = state.judged === "accuracy" ? 3 : 4, bit = state.judged === "accuracy" ? 1 : 2;
    return group.clients.dots.filter((dot) => known(dot[column])).map((dot) => ({ seed: dot[0], client: dot[1], train: dot[2], value: dot[column], low: Boolean(dot[5] & bit) }));
  }
  const tellClient = (group, dot) => tell(name(group), `client ${dot.client}${group.seeds.length > 1 ? `, seed ${dot.seed}` : ""}: ${dot.value.toFixed(2)} %`,
    ...(known(dot.train) ? [`${short(dot.train)} training samples`] : []));
  const jitter = (number) => { const x = Math.sin(number * 12.9898) * 43758.5453; return x - Math.floor(x); };

  function drawClients(box) {
    const kinds = Object.entries(FINETUNED).filter(([key]) => inSetting().some((group) => group.clients && group.clients.box[key]));
    if (kinds.length && !kinds.some(([key]) => key === state.judged)) state.judged = kinds[0][0];
    const groups = visible().filter((group) => group.clients && group.clients.box[state.judged])
      .sort((a, b) => b.clients.box[state.judged][5] - a.clients.box[state.judged][5]);
    box.replaceChildren(controls(kinds.length > 1 ? choice("which accuracy", kinds, "judged") : null));
    if (!groups.length) { box.append(quiet("Nothing to draw: no method shown has a client table.")); return; }
    const width = box.clientWidth;
    const all = groups.flatMap((group) => dotsOf(group).map(({ value }) => value).concat(group.clients.box[state.judged][0]));
    const low = Math.max(0, Math.floor(extent(all)[0] / 10) * 10 - 1), high = 100.5;
    box.append(strip(groups, width, low, high));
    const shown = groups.find((group) => group.clients.count > group.clients.dots.length);
    if (shown) box.append(quiet(`Of ${shown.clients.count} clients ${shown.clients.dots.length} are drawn one by one, evenly spaced by accuracy; box and mean are of all.`));
    box.append(numbers("clients", ["method", "clients", "least", "quartile", "median", "quartile", "greatest", "mean", "worst decile"], groups.map((group) =>
      [name(group), group.clients.count, ...group.clients.box[state.judged].map((value) => measured("accuracy", value))])));
    if (groups.some((group) => dotsOf(group).some(({ train }) => known(train) && train > 0))) scatter(box, groups, width, low, high);
  }

  function strip(groups, width, low, high) {
    const beside = width > 760, left = beside ? 230 : 8, row = beside ? 34 : 52, lane = 24;
    const height = 26 + groups.length * row + 34;
    const chart = plot(width, height, "accuracy of each client, a row per method; numbers in the table below",
      { low, high, label: `client's accuracy (%), ${FINETUNED[state.judged]}` }, { low: 0, high: 1, ticks: [] }, { left: left + 6, top: 8 });
    for (const value of ticks(low, high, chart.width / 76)) chart.layer.append(svg("path", { class: "gridline", d: `M${point(chart.sx(value))} ${chart.edge.top}v${chart.height}` }));
    groups.forEach((group, place) => {
      const middle = 8 + place * row + row - lane / 2 - 4;
      const [least, first, median, third, most, mean, worst] = group.clients.box[state.judged];
      const dots = dotsOf(group);
      for (const dot of dots) { dot.x = chart.sx(dot.value); dot.y = middle + (jitter(dot.client + 0.37 * dot.seed) - 0.5) * (lane - 8); }
      chart.layer.append(svg("path", { class: "gridline", d: `M${chart.edge.left} ${middle + row / 2 + (beside ? 0 : 3)}h${chart.width}` }));
      chart.drawing.append(beside ? label(left - 2, middle + 4, cut(name(group), 34), "end", "strong") : label(left + 6, middle - lane / 2 - 1, name(group), "start", "strong"));
      chart.layer.append(series(group,
        svg("path", { class: "dot", "stroke-width": 4.2, "stroke-opacity": 0.5, d: dots.filter(({ low: bad }) => !bad).map(({ x, y }) => `M${point(x)} ${point(y)}h.01`).join("") }),
        svg("path", { class: "cross", d: dots.filter(({ low: bad }) => bad).map(({ x, y }) => `M${point(x - 2.6)} ${point(y - 2.6)}l5.2 5.2m0 -5.2l-5.2 5.2`).join("") }),
        svg("path", { class: "box", d: `M${point(chart.sx(least))} ${middle}H${point(chart.sx(first))}M${point(chart.sx(third))} ${middle}H${point(chart.sx(most))}` }),
        svg("rect", { class: "box", x: point(chart.sx(first)), y: middle - 9, width: point(Math.max(1, chart.sx(third) - chart.sx(first))), height: 18 }),
        svg("path", { class: "median", d: `M${point(chart.sx(median))} ${middle - 9}v18` }),
        svg("path", { class: "mark", d: SIGNS[3](chart.sx(mean), middle, 4.5) }),
        svg("path", { class: "mark", d: SIGNS[2](chart.sx(worst), middle + 9, 4) })));
      group.drawn = { dots, middle };
    });
    const ring = svg("circle", { class: "ring", r: 5.5, visibility: "hidden" });
    chart.drawing.append(ring);
    pointer(chart.drawing, (px, py, cx, cy) => {
      const group = px === null ? null : groups.find((one) => Math.abs(one.drawn.middle - py) < row / 2);
      const dot = group ? hit(group.drawn.dots, px, py, 12) : null;
      ring.setAttribute("visibility", dot ? "visible" : "hidden");
      if (!group) return hideTip();
      if (dot) { ring.setAttribute("cx", dot.x); ring.setAttribute("cy", dot.y); showTip(cx, cy, ...tellClient(group, dot)); return; }
      const [, first, median, third, , mean, worst] = group.clients.box[state.judged];
      showTip(cx, cy, ...tell(name(group), `mean ${mean}, worst decile ${worst}`, `median ${median}, quartiles ${first} and ${third}`));
    });
    return chart.drawing;
  }

  function panelSize(groups, width) {
    const across = Math.max(1, Math.min(groups.length, Math.floor(width / 215))), each = Math.floor(width / across) - 4;
    return { each, tall: Math.max(172, Math.min(240, each * 0.6)) };
  }

  // A panel per method; the line joins the medians of five equal parts of the clients by size.
  function scatter(box, groups, width, low, high) {
    const { each, tall } = panelSize(groups, width);
    box.append(html("h3", {}, "Accuracy against training samples"),
      quiet("Across: training samples, logarithmic; up: accuracy in percent. A dot per client; the line joins the medians of five equal parts of the clients by size."));
    const sizes = groups.flatMap((group) => dotsOf(group).map(({ train }) => train).filter((train) => known(train) && train > 0));
    let [least, most] = extent(sizes);
    if (least === most) { least /= 1.5; most *= 1.5; }
    const panels = html("div", { class: "panels" });
    groups.forEach((group) => {
      const chart = plot(each, tall, `accuracy against training samples, ${name(group)}`, { low: least * 0.93, high: most * 1.07, log: true },
        { low, high }, { left: 32, right: 8, top: 22, bottom: 24, small: true });
      const dots = dotsOf(group).filter(({ train }) => known(train) && train > 0);
      for (const dot of dots) { dot.x = chart.sx(dot.train); dot.y = chart.sy(dot.value); }
      const sorted = [...dots].sort((a, b) => a.train - b.train), line = [];
      if (sorted.length >= 15) {
        for (let part = 0; part < 5; part++) {
          const some = sorted.slice(Math.round(part * sorted.length / 5), Math.round((part + 1) * sorted.length / 5));
          const middle = (key) => quantile(some.map((dot) => dot[key]).sort((a, b) => a - b), 0.5);
          line.push([middle("x"), middle("y")]);
        }
      }
      chart.drawing.append(label(32, 14, cut(name(group), Math.floor(each / 7)), null, "strong"));
      chart.layer.append(series(group,
        svg("path", { class: "dot", "stroke-width": 4, "stroke-opacity": 0.55, d: dots.map(({ x, y }) => `M${point(x)} ${point(y)}h.01`).join("") }),
        svg("path", { class: "median", d: path(line) })));
      pointer(chart.drawing, (px, py, cx, cy) => {
        const dot = hit(dots, px, py, 14);
        if (dot) showTip(cx, cy, ...tellClient(group, dot));
        else hideTip();
      });
      panels.append(chart.drawing);
    });
    box.append(panels);
  }

  // ---- fairness

  function drawFairness(box) {
    const shown = visible().filter((group) => group.fairness);
    const baselines = [...new Set(shown.flatMap((group) => Object.keys(group.fairness)))].sort();
    if (!baselines.includes(state.baseline)) state.baseline = baselines[0];
    box.replaceChildren(controls(baselines.length > 1 ? choice("baseline", baselines.map((text) => [text, text]), "baseline") : null));
    const groups = shown.filter((group) => group.fairness[state.baseline]);
    if (!groups.length) { box.append(quiet("Nothing to draw: no method shown has a baseline of its split and seeds.")); return; }
    const { each, tall } = panelSize(groups, box.clientWidth), panels = html("div", { class: "panels" });
    const all = groups.flatMap((group) => group.fairness[state.baseline].dots.flatMap(([, , x, y]) => [x, y]));
    const axis = { low: Math.max(0, Math.floor(extent(all)[0] / 10) * 10 - 1), high: 100.5 };
    for (const group of groups) {
      const { name: called, count, harmed, dots } = group.fairness[state.baseline];
      const chart = plot(each, tall, `accuracy against that of ${state.baseline}, ${called}`, axis, axis,
        { left: 32, right: 8, top: 22, bottom: 24, small: true });
      const drawn = dots.map(([seed, client, base, own]) => ({ seed, client, base, own, x: chart.sx(base), y: chart.sy(own) }));
      chart.drawing.append(label(32, 14, cut(called, Math.floor(each / 7)), null, "strong"));
      chart.layer.append(svg("path", { class: "cursor", d: path([axis.low, axis.high].map((end) => [chart.sx(end), chart.sy(end)])) }),
        series(group, svg("path", { class: "dot", "stroke-width": 4, "stroke-opacity": 0.55, d: drawn.map(({ x, y }) => `M${point(x)} ${point(y)}h.01`).join("") })));
      pointer(chart.drawing, (px, py, cx, cy) => {
        const dot = hit(drawn, px, py, 14);
        if (dot) showTip(cx, cy, ...tell(called, `client ${dot.client}${group.seeds.length > 1 ? `, seed ${dot.seed}` : ""}: ${dot.own.toFixed(2)} %`, `${state.baseline}: ${dot.base.toFixed(2)} %`));
        else if (px === null) hideTip();
        else showTip(cx, cy, ...tell(called, `${harmed} % of ${count} clients are harmed`));
      });
      panels.append(chart.drawing);
    }
    box.append(panels);
    if (groups.some((group) => group.fairness[state.baseline].count > group.fairness[state.baseline].dots.length)) {
      box.append(quiet("Clients drawn are evenly spaced by the baseline's accuracy; shares are of all."));
    }
  }

  // ---- partition

  const ORDERS = [["id", "by number"], ["size", "by size"], ["class", "by largest class"]];
  function drawPartition(box) {
    const here = data.partitions.filter((one) => one.setting === state.setting);
    if (!here.length) { box.replaceChildren(quiet("No run of this data set and partition is drawn here.")); return; }
    if (state.partition >= here.length) state.partition = 0;
    const chosen = here[state.partition], counts = chosen.counts;
    const size = counts.map((row) => row.reduce((sum, value) => sum + value, 0));
    const main = counts.map((row) => row.indexOf(Math.max(...row)));
    const order = counts.map((_, place) => place);
    if (state.order === "size") order.sort((a, b) => size[b] - size[a]);
    if (state.order === "class") order.sort((a, b) => main[a] - main[b] || counts[b][main[b]] - counts[a][main[a]]);
    const text = (one) => `seed ${one.seeds.join(", ")} (${one.runs} ${one.runs === 1 ? "run" : "runs"})`;
    const bar = controls(here.length > 1 ? select("partition of", here.map((one, place) => [place, text(one)]), "partition") : html("span", {}, text(chosen)),
      html("label", {}, "clients", choice("order of clients", ORDERS, "order")));
    const top = Math.max(1, ...counts.flat()), log = (value) => top > 1 ? Math.log(value) / Math.log(top) : 1;
    const facts = `${chosen.all} clients hold ${chosen.samples.toLocaleString("en")} samples: least ${chosen.sizes[0]}, median ${chosen.sizes[1]}, most ${chosen.sizes[2]}; ${chosen.held} of ${chosen.classes.length} classes per client on average.`;
    const drawing = heat(box.clientWidth, `samples per client and class, ${text(chosen)}; numbers in the table below`,
      chosen.classes.map(String), order.map((place) => String(chosen.clients[place])),
      (row, column) => { const value = counts[order[column]][row]; return value > 0 ? log(value) : null; },
      (row, column) => tell(`client ${chosen.clients[order[column]]}, class ${chosen.classes[row]}`, `${counts[order[column]][row]} of its ${size[order[column]]} samples`),
      { xLabel: "client", yLabel: "class" });
    box.replaceChildren(bar, quiet(facts), drawing, heatScale(["1", short(Math.round(Math.sqrt(top))), short(top)]),
      numbers("partition", ["client", ...chosen.classes.map((one) => `class ${one}`), "all"], order.map((place) => [chosen.clients[place], ...counts[place], size[place]])));
    const left = data.partitions_left_out;
    if (counts.length < chosen.all) box.append(quiet(`${counts.length} of ${chosen.all} clients are drawn, evenly spaced.`));
    if (left) box.append(quiet(`${left} more ${left === 1 ? "partition is" : "partitions are"} left out of this page.`));
  }

  // ---- masks

  const SCALES = [["share", "share of the mask"], ["entries", "entries"]];
  function drawMasks(box) {
    const groups = inSetting().filter((group) => group.mask);
    if (!groups.length) { box.replaceChildren(quiet("No method of this data set and partition has a mask.")); return; }
    if (!groups.some((group) => group.method === state.mask)) state.mask = byAccuracy(groups)[0].method;
    const group = groups.find((one) => one.method === state.mask), mask = group.mask, cells = mask.entries;
    const sums = mask.ends.map((_, column) => cells.reduce((sum, row) => sum + (row[column] || 0), 0));
    const top = Math.max(1e-9, ...cells.flat().filter(known)), shares = state.scale === "share";
    const bar = controls(groups.length > 1 ? select("method", groups.map((one) => [one.method, name(one)]), "mask") : html("strong", {}, name(group)),
      choice("scale", SCALES, "scale"));
    const span = (column) => { const end = mask.ends[column], start = end - mask.size + 1; return mask.size > 1 ? `rounds ${Math.max(1, start)} to ${end}` : `round ${end}`; };
    const share = (row, column) => sums[column] > 0 ? (cells[row][column] || 0) / sums[column] : 0;
    const most = Math.max(1e-9, ...mask.layers.flatMap((_, row) => mask.ends.map((__, column) => share(row, column))));
    const percent = (value) => `${+(100 * value).toPrecision(3)} %`;
    const least = Math.max(top / 1e5, Math.min(top, ...cells.flat().filter((value) => known(value) && value > 0)));
    const log = (value) => top > least ? 0.03 + 0.97 * Math.max(0, Math.log(value / least)) / Math.log(top / least) : 1;
    const drawing = heat(box.clientWidth, `personalised entries by tensor over rounds, ${name(group)}; numbers in the table below`,
      mask.layers, mask.ends.map(short),
      (row, column) => { const value = cells[row][column]; return value > 0 ? (shares ? Math.sqrt(share(row, column) / most) : log(value)) : null; },
      (row, column) => tell(`${mask.layers[row]}, ${span(column)}`, `${short(cells[row][column])} entries, ${percent(share(row, column))} of the mask`),
      { xLabel: "round", cell: Math.max(9, Math.min(24, 520 / mask.layers.length)) });
    const all = sums.map((value, place) => [mask.ends[place] - mask.size / 2, value]); // above the middle of its column
    const whole = plot(box.clientWidth, 116, `personalised entries in all, ${name(group)}`, { low: mask.ends[0] - mask.size, high: mask.ends[mask.ends.length - 1], ticks: [] },
      { low: 0, high: Math.max(...sums, 1e-9) * 1.08, label: "personalised entries in all" + (mask.parameters ? `, of ${mask.parameters.toLocaleString("en")} parameters` : "") }, { left: heatLeft(mask.layers, box.clientWidth).left, right: 4, bottom: 8 });
    whole.layer.append(svg("g", { class: color(group.method) }, svg("path", { class: "curve", d: path(all.map(([x, y]) => [whole.sx(x), whole.sy(y)])) })));
    pointer(whole.drawing, (px, py, cx, cy) => {
      if (px === null) return;
      const near = nearest(all, ([x]) => Math.abs(whole.sx(x) - px));
      showTip(cx, cy, ...tell(span(all.indexOf(near)), `${short(near[1])} entries` + (mask.parameters ? `, ${percent(near[1] / mask.parameters)} of all` : "")));
    });
    const scale = shares ? ["0", percent(most / 4), percent(most)] : [short(least), short(Math.sqrt(least * top)), short(top)];
    const chosen = mask.ends.map((_, place) => place).filter((place) => place === mask.ends.length - 1 || place % Math.ceil(mask.ends.length / 11) === 0);
    box.replaceChildren(bar, whole.drawing, drawing, heatScale(scale),
      numbers("masks", ["tensor", ...chosen.map(span)], mask.layers.map((layer, row) => [layer, ...chosen.map((column) => short(cells[row][column]))])));
  }

  // ---- cost

  function drawCost(box) {
    const total = (group, kind) => reached(group, kind, group.cost.round[group.cost.round.length - 1]);
    const kinds = Object.entries(ACROSS).filter(([kind]) => kind !== "round" && inSetting().some((group) => known(total(group, kind))));
    if (!kinds.length) { box.replaceChildren(); return; }
    if (!kinds.some(([kind]) => kind === state.cost)) state.cost = kinds[0][0];
    const groups = visible().map((group) => ({ group, cost: total(group, state.cost) })).filter(({ group, cost }) => known(cost) && known(group.accuracy));
    box.replaceChildren(controls(select("accuracy against", kinds, "cost")));
    if (!groups.length) { box.append(quiet("Nothing to draw: no method shown was evaluated.")); return; }
    const [least, most] = extent(groups.map(({ cost }) => cost)), [low, high] = extent(groups.map(({ group }) => group.accuracy));
    const log = least > 0 && most / least > 20, pad = (high - low) * 0.08 || 1;
    const chart = plot(box.clientWidth, Math.min(430, Math.max(300, box.clientWidth * 0.4)), `accuracy against ${ACROSS[state.cost]}, a sign per method; numbers in the table below`,
      { low: log ? least / 1.3 : 0, high: log ? most * 1.3 : most * 1.06 || 1, log, label: ACROSS[state.cost] },
      { low: Math.max(0, low - pad), high: Math.min(100.5, high + pad), label: "accuracy, mean over clients (%)" });
    const taken = [];
    const clear = (room) => taken.every((other) => room[0] > other[2] || room[2] < other[0] || room[1] > other[3] || room[3] < other[1]);
    for (const item of groups) {
      item.x = chart.sx(item.cost); item.y = chart.sy(item.group.accuracy);
      taken.push([item.x - 6, item.y - 6, item.x + 6, item.y + 6]);
    }
    for (const { group, x, y } of byAccuracy(groups.map((item) => ({ ...item, accuracy: item.group.accuracy })))) {
      const layer = series(group, svg("path", { class: full(group.method), d: sign(group.method, x, y, 5) }));
      const text = cut(name(group) + (group.status.includes("finished") ? "" : `, ${group.status}`), 34), wide = text.length * 6.3;
      // The first place beside the sign that is free; without one the name is left to the pointer.
      for (const [right, down, anchor] of [[9, 4, "start"], [-9, 4, "end"], [0, -10, "middle"], [0, 19, "middle"],
        [9, -7, "start"], [9, 15, "start"], [-9, -7, "end"], [-9, 15, "end"]]) {
        const from = x + right - wide * { start: 0, middle: 0.5, end: 1 }[anchor], under = y + down;
        const room = [from, under - 10, from + wide, under + 2];
        if (from < chart.edge.left || from + wide > chart.edge.left + chart.width || under > chart.edge.top + chart.height || under < 24 || !clear(room)) continue;
        taken.push(room);
        layer.append(label(x + right, under, text, anchor, "small strong"));
        break;
      }
      chart.layer.append(layer);
    }
    pointer(chart.drawing, (px, py, cx, cy) => {
      const near = hit(groups, px, py, 24);
      highlight(near && near.group.method);
      if (!near) return hideTip();
      showTip(cx, cy, ...tell(name(near.group), `accuracy ${near.group.accuracy.toFixed(2)} %`, `${ACROSS[state.cost]}: ${short(near.cost)}`, near.group.status));
    });
    box.append(chart.drawing);
  }

  // ---- tables: a click on a heading sorts, numbers first from the greatest

  function sortable(table) {
    const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells], body = table.tBodies[0];
    heads.forEach((head, place) => head.querySelector("button").addEventListener("click", () => {
      const numeric = head.classList.contains("number");
      const before = head.getAttribute("aria-sort");
      const down = before ? before === "ascending" : numeric;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => { const cell = row.cells[place]; return numeric ? (cell.dataset.value === undefined ? null : Number(cell.dataset.value)) : cell.textContent; };
      const rows = [...body.rows].map((row) => [key(row), row]);
      rows.sort(([a], [b]) => {
        if (a === null || b === null) return (a === null) - (b === null); // what is not known stands last
        const order = numeric ? a - b : a.localeCompare(b, "en", { numeric: true });
        return down ? -order : order;
      });
      body.append(...rows.map(([, row]) => row));
    }));
  }

  // ---- the page

  function drawSettings() {
    const bar = document.getElementById("settings");
    if (!bar || data.settings.length < 2) return;
    const change = (place) => { state.setting = place; state.zoom = null; state.partition = 0; begin(); draw(); };
    if (data.settings.length > 4) {
      const menu = html("select", { "aria-label": "data set and partition of the charts", onchange: () => change(menu.selectedIndex) },
        data.settings.map((text, place) => html("option", { selected: place === state.setting }, text)));
      bar.replaceChildren(menu);
      return;
    }
    bar.replaceChildren(...data.settings.map((text, place) =>
      html("button", { type: "button", "aria-pressed": String(place === state.setting), onclick: () => change(place) }, text)));
  }

  function begin() {
    state.hidden.clear();
    if (inSetting().length > LEGEND) showBest();
    const metrics = Object.keys(data.metrics), drawn = (metric) => inSetting().some((group) => group.curves[metric]);
    if (!drawn(state.metric)) state.metric = metrics.find(drawn) || metrics[0] || null;
  }

  function draw() {
    hideTip();
    if (data.settings.length > 1) {
      for (const box of document.querySelectorAll(".chart")) box.closest("section").querySelector("h2").dataset.setting = data.settings[state.setting];
    }
    drawSettings();
    for (const [id, paint] of Object.entries({ curves: drawCurves, clients: drawClients, fairness: drawFairness, partition: drawPartition, masks: drawMasks, cost: drawCost })) {
      const box = document.querySelector(`#${id} .chart`);
      if (box) paint(box);
    }
  }

  function theme() {
    const button = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)");
    const dark = () => page.dataset.theme ? page.dataset.theme === "dark" : system.matches;
    const label = () => { button.textContent = dark() ? "light" : "dark"; button.setAttribute("aria-label", `${button.textContent} colours`); };
    button.addEventListener("click", () => { page.dataset.theme = dark() ? "light" : "dark"; label(); });
    system.addEventListener("change", label);
    button.hidden = false;
    label();
  }

  document.querySelectorAll("table.sortable").forEach(sortable);
  theme();
  if (data) {
    begin();
    draw();
    let width = page.clientWidth, waiting = 0;
    window.addEventListener("resize", () => {
      if (page.clientWidth === width) return;
      width = page.clientWidth;
      cancelAnimationFrame(waiting);
      waiting = requestAnimationFrame(draw);
    });
  }
  page.dataset.ready = "yes";
})();
