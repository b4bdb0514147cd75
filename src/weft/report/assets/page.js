"use strict";
// Draws the figures of the page from its data, switches methods and clients, and asks for news where the page is live.
(() => {
  const root = document.documentElement;
  let content = JSON.parse(document.getElementById("data").textContent);
  const off = new Set(); // groups that are switched off, by label: a live page may number them anew
  const clients = new Set(["mean"]);
  const drawn = new Set(); // names of figures that have been in sight
  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  const themes = ["auto", "light", "dark"];
  let theme = "auto";
  let printing = false;

  // ---- theme

  function dress() {
    const dark = !printing && (theme === "dark" || (theme === "auto" && systemDark.matches));
    root.dataset.theme = dark ? "dark" : "light";
    const button = document.getElementById("theme");
    button.textContent = `theme: ${theme}`;
    const words = theme === "auto" ? "as the system has it" : theme;
    button.setAttribute("aria-label", `Theme: ${words}. Press for the next one`);
    drawAll();
  }

  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function colour(word) {
    if (word === "@sequential") return [[0, css("--low")], [0.5, css("--mid")], [1, css("--high")]];
    if (word === "@diverging") return [[0, css("--minus")], [0.5, css("--none")], [1, css("--plus")]];
    const series = /^@(\d)(~?)$/.exec(word);
    if (series) return css(`--s${series[1]}`) + (series[2] ? "26" : "");
    return css(`--${word.slice(1)}`);
  }

  function coloured(value) {
    if (typeof value === "string") return /^@[a-z0-9]+~?$/.test(value) ? colour(value) : value;
    if (Array.isArray(value)) return value.length && typeof value[0] === "number" ? value : value.map(coloured);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, key === "meta" ? item : coloured(item)]));
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
    const given = coloured(spec.layout);
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
      responsive: true, displaylogo: false, displayModeBar: false, // its buttons reach out to Plotly's own services
    };
    Plotly.react(plot, coloured(traces), layout, config);
    document.getElementById("js-plotly-tester")?.setAttribute("aria-hidden", "true"); // Plotly measures words with it
  }

  function drawAll() {
    document.querySelectorAll("figure[data-name]").forEach(draw);
    document.querySelectorAll(".figures").forEach((box) => {
      const none = [...box.children].every((child) => child.hidden || child.classList.contains("empty"));
      let said = box.querySelector(".empty");
      if (none && !said) {
        said = document.createElement("p");
        said.className = "empty";
        said.textContent = "Nothing is switched on that this section shows.";
        box.append(said);
      } else if (!none && said) said.remove();
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

  // ---- the numbers of a figure, as a table, when somebody opens it

  const plainText = (text) => String(text).replaceAll("&lt;", "<").replaceAll("&amp;", "&");

  function rowsOf(spec) {
    const lines = [];
    const named = (axis, value) => (/^\d/.test(value) ? `${spec.layout[axis].title.text} ${value}` : value); // task 3, not 3
    for (const trace of spec.traces) {
      if (trace.meta && (trace.meta.veil || !groupOn(trace.meta.group) || !clientOn(trace.meta.client))) continue;
      if (trace.type === "heatmap") {
        trace.z.forEach((row, at) => row.forEach((value, column) => {
          const more = trace.customdata && !trace.text ? `, not zero ${Number(trace.customdata[at][column].toPrecision(4))}` : "";
          const words = trace.text ? trace.text[at][column] : `${named("yaxis", trace.y[at])}, ${named("xaxis", trace.x[column])}${more}`;
          if (value !== null) lines.push([words, value]);
        }));
      } else {
        trace.y.forEach((value, at) => {
          if (value === null) return;
          const hover = trace.customdata ? trace.customdata[at][0] + trace.customdata[at][1] : trace.text ? trace.text[at] : "";
          const where = typeof trace.x[at] === "string" ? trace.x[at] : "";
          lines.push([[trace.name, where, hover].filter(Boolean).join(", "), value]);
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
    dress();
  });
  systemDark.addEventListener("change", dress);
  addEventListener("beforeprint", () => {
    printing = true;
    document.querySelectorAll("figure[data-name]").forEach((figure) => drawn.add(figure.dataset.name));
    dress();
  });
  addEventListener("afterprint", () => { printing = false; dress(); });

  // ---- news, where the page is live: sections are replaced, figures keep their place and their state

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

  function show(news) {
    content = news;
    document.title = news.title;
    const main = document.getElementById("main");
    for (const name of ["head", "status", "bar"]) replace(document.getElementById(name), news.html[name] || "");
    for (const name of news.sections) {
      let box = document.getElementById(name);
      if (!box) {
        box = document.createElement("section");
        box.id = name;
        main.append(box);
      }
      replace(box, news.html[name]);
    }
    press();
  }

  async function ask() {
    let wait = 1000;
    try {
      const answer = await fetch(`news?since=${encodeURIComponent(content.version || "")}`, { cache: "no-store" });
      if (answer.status === 200) show(await answer.json());
      else if (answer.status !== 204) throw new Error(answer.statusText);
      root.dataset.heard = String(Date.now());
      if (content.over) wait = 5000;
    } catch {
      const said = document.getElementById("status");
      said.dataset.html = "";
      said.innerHTML = "<p class='state stopped'></p>";
      said.firstChild.textContent = "weft watch has ended or cannot be reached; this is the last that it knew.";
      wait = 3000;
    }
    setTimeout(ask, wait);
  }

  dress();
  document.querySelectorAll("figure[data-name]").forEach((figure) => seen.observe(figure));
  if (root.dataset.live === "yes") ask();
  root.dataset.ready = "yes";
})();
