"use strict";
// Draws the figures from the data of the page, switches methods and clients, and polls for updates if the page is live.
(() => {
  const root = document.documentElement;
  let content = JSON.parse(document.getElementById("data").textContent);
  const off = new Set(); // labels of groups that are switched off: their indices may change in a live page
  const clients = new Set(["mean"]);
  const drawn = new Set(); // names of figures that have been visible
  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  const themes = ["auto", "light", "dark"];
  let theme = "auto";
  let printing = false;

  // ---- theme

  function applyTheme() {
    const dark = !printing && (theme === "dark" || (theme === "auto" && systemDark.matches));
    root.dataset.theme = dark ? "dark" : "light";
    const button = document.getElementById("theme");
    button.textContent = `theme: ${theme}`;
    const words = theme === "auto" ? "system" : theme;
    button.setAttribute("aria-label", `Theme: ${words}. Press for the next one`);
    drawAll();
  }

  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function color(word) {
    if (word === "@sequential") return [[0, css("--low")], [0.5, css("--mid")], [1, css("--high")]];
    if (word === "@diverging") return [[0, css("--minus")], [0.5, css("--none")], [1, css("--plus")]];
    const series = /^@(\d)(~?)$/.exec(word);
    if (series) return css(`--s${series[1]}`) + (series[2] ? "26" : "");
    return css(`--${word.slice(1)}`);
  }

  function colored(value) {
    if (typeof value === "string") return /^@[a-z0-9]+~?$/.test(value) ? color(value) : value;
    if (Array.isArray(value)) return value.length && typeof value[0] === "number" ? value : value.map(colored);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, key === "meta" ? item : colored(item)]));
    }
    return value;
  }

  // ---- figures

  const groupOn = (group) => group === null || group === undefined || !off.has(content.groups[group].label);
  const clientOn = (client) => client === null || client === undefined || clients.has(client);

  function layoutOf(spec, width) {
    const axis = {
      gridcolor: css("--grid"), zerolinecolor: css("--faint"), zeroline: false, linecolor: css("--line"), automargin: true,
      fixedrange: true, title: { standoff: 8 }, tickfont: { size: 12 },
    };
    const given = colored(spec.layout);
    const title = (which) => ({ ...axis.title, font: { size: 12, color: css("--soft") }, ...((given[which] || {}).title || {}) });
    return {
      ...given,
      height: spec.height,
      width: printing ? width : undefined,
      autosize: true,
      margin: { l: 12, r: 12, t: 14, b: 10, pad: 2 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: css("--sans"), size: 13, color: css("--ink") },
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--faint"), font: { color: css("--ink") }, namelength: -1, align: "left" },
      showlegend: Boolean(given.showlegend),
      legend: { orientation: "h", y: -0.22, yanchor: "top", x: 0, font: { size: 12 } },
      hovermode: spec.traces[0] && spec.traces[0].type === "scatter" ? "x unified" : "closest",
      xaxis: { ...axis, ...(given.xaxis || {}), title: title("xaxis") },
      yaxis: { ...axis, ...(given.yaxis || {}), title: title("yaxis") },
    };
  }

  function draw(figure) {
    const spec = content.figures[figure.dataset.name];
    const plot = figure.querySelector(".plot");
    if (!spec) return;
    figure.hidden = !(groupOn(spec.group) && clientOn(spec.client));
    if (figure.hidden || !drawn.has(figure.dataset.name)) return;
    const traces = spec.traces.filter((trace) => !trace.meta || (groupOn(trace.meta.group) && clientOn(trace.meta.client)));
    const layout = layoutOf(spec, plot.clientWidth);
    const config = {
      responsive: true, displaylogo: false, displayModeBar: false, // its buttons call Plotly's services
    };
    Plotly.react(plot, colored(traces), layout, config);
    document.getElementById("js-plotly-tester")?.setAttribute("aria-hidden", "true"); // Plotly measures text with it
  }

  function drawAll() {
    document.querySelectorAll("figure[data-name]").forEach(draw);
    document.querySelectorAll(".figures").forEach((box) => {
      const none = [...box.children].every((child) => child.hidden || child.classList.contains("empty"));
      let note = box.querySelector(".empty");
      if (none && !note) {
        note = document.createElement("p");
        note.className = "empty";
        note.textContent = "Nothing in this section is selected.";
        box.append(note);
      } else if (!none && note) note.remove();
    });
  }

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting && !drawn.has(entry.target.dataset.name)) {
        drawn.add(entry.target.dataset.name);
        draw(entry.target);
      }
    }
  }, { rootMargin: "600px" });

  // ---- the numbers of a figure as a table, filled when it is opened

  const plainText = (text) => String(text).replaceAll("&lt;", "<").replaceAll("&amp;", "&");

  function rowsOf(spec) {
    const lines = [];
    for (const trace of spec.traces) {
      if (trace.meta && (trace.meta.band || !groupOn(trace.meta.group) || !clientOn(trace.meta.client))) continue;
      const add = (value, ...words) => {
        if (value !== null) lines.push([words.filter(Boolean).join(", "), value]);
      };
      if (trace.type === "heatmap") {
        trace.z.forEach((row, at) => row.forEach((value, column) => {
          add(value, trace.y[at], trace.x[column], trace.customdata && trace.customdata[at][column]);
        }));
      } else {
        trace.y.forEach((value, at) => {
          const category = typeof trace.x[at] === "string" ? trace.x[at] : "";
          const deviation = trace.customdata ? trace.customdata[at] : "";
          add(value, trace.name, category, (trace.text[at] || "") + deviation);
        });
      }
    }
    return lines;
  }

  function fillNumbers(details) {
    details.querySelector(".scroll")?.remove();
    if (!details.open) return;
    const box = document.createElement("div");
    box.className = "scroll";
    box.tabIndex = 0;
    const table = box.appendChild(document.createElement("table"));
    for (const [name, value] of rowsOf(content.figures[details.closest("figure").dataset.name])) {
      const row = table.insertRow();
      const head = row.appendChild(document.createElement("th"));
      head.scope = "row";
      head.textContent = plainText(name);
      row.insertCell().textContent = Math.abs(value) >= 1e6 ? value.toLocaleString("en") : Number(value.toPrecision(6));
    }
    details.append(box);
  }

  // ---- switches

  function press() {
    document.querySelectorAll("[data-group]").forEach((chip) => {
      chip.setAttribute("aria-pressed", String(groupOn(Number(chip.dataset.group))));
    });
    document.querySelectorAll("[data-client]").forEach((chip) => {
      chip.setAttribute("aria-pressed", String(clients.has(chip.dataset.client)));
    });
    drawAll();
    document.querySelectorAll(".numbers[open]").forEach(fillNumbers);
  }

  const toggle = (set, key) => (set.has(key) ? set.delete(key) : set.add(key));

  document.getElementById("bar").addEventListener("click", (event) => {
    const chip = event.target.closest(".chip");
    if (!chip) return;
    if (chip.dataset.group) toggle(off, content.groups[Number(chip.dataset.group)].label);
    else toggle(clients, chip.dataset.client);
    press();
  });
  document.getElementById("main").addEventListener("toggle", (event) => {
    if (event.target.classList.contains("numbers")) fillNumbers(event.target);
  }, true);
  document.getElementById("main").addEventListener("click", (event) => {
    const figure = event.target.classList.contains("save") && event.target.closest("figure");
    if (figure) Plotly.downloadImage(figure.querySelector(".plot"), { format: "svg", filename: figure.dataset.name });
  });
  document.getElementById("theme").addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    applyTheme();
  });
  systemDark.addEventListener("change", applyTheme);
  addEventListener("beforeprint", () => {
    printing = true;
    document.querySelectorAll("figure[data-name]").forEach((figure) => drawn.add(figure.dataset.name));
    applyTheme();
  });
  addEventListener("afterprint", () => { printing = false; applyTheme(); });

  // ---- updates of a live page: sections are replaced, figures keep their state

  function replace(box, html) {
    if (box.dataset.html === html) return;
    box.dataset.html = html;
    const kept = new Map([...box.querySelectorAll(".plot")].map((plot) => [plot.closest("figure").dataset.name, plot]));
    const open = [...box.querySelectorAll("details")].map((details) => details.open);
    box.innerHTML = html;
    box.querySelectorAll("figure[data-name]").forEach((figure) => {
      const old = kept.get(figure.dataset.name);
      const fresh = figure.querySelector(".plot");
      if (old) {
        old.setAttribute("aria-label", fresh.getAttribute("aria-label"));
        old.style.height = fresh.style.height;
        fresh.replaceWith(old);
      }
      seen.observe(figure);
    });
    box.querySelectorAll("details").forEach((details, place) => { details.open = Boolean(open[place]); });
  }

  function show(update) {
    content = update;
    document.title = update.title;
    const main = document.getElementById("main");
    for (const name of ["head", "status", "bar"]) replace(document.getElementById(name), update.html[name] || "");
    for (const name of update.sections) {
      let box = document.getElementById(name);
      if (!box) {
        box = document.createElement("section");
        box.id = name;
        main.append(box);
      }
      replace(box, update.html[name]);
    }
    press();
  }

  async function poll() {
    let wait = 1000;
    try {
      const reply = await fetch(`updates?since=${encodeURIComponent(content.version || "")}`, { cache: "no-store" });
      if (reply.status === 200) show(await reply.json());
      else if (reply.status !== 204) throw new Error(reply.statusText);
      root.dataset.polled = String(Date.now());
      if (content.over) wait = 5000;
    } catch {
      const status = document.getElementById("status");
      status.dataset.html = "";
      status.innerHTML = "<p class='state stopped'></p>";
      status.firstChild.textContent = "weft watch has stopped or cannot be reached; this is the last known state.";
      wait = 3000;
    }
    setTimeout(poll, wait);
  }

  applyTheme();
  document.querySelectorAll("figure[data-name]").forEach((figure) => seen.observe(figure));
  if (root.dataset.live === "yes") poll();
  root.dataset.ready = "yes";
})();
