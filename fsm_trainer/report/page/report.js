"use strict";
(async () => {
  // The library is kept compressed in the page: two fifths of its size.
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const library = document.createElement("script");
  library.textContent = await new Response(stream).text();
  document.head.append(library);

  const specs = JSON.parse(document.getElementById("charts").textContent);
  const touch = matchMedia("(pointer: coarse)").matches;
  const narrow = () => innerWidth < 600;
  const axis = (more) => ({ automargin: true, fixedrange: touch, zeroline: false, ...more });
  const layoutOf = (spec, width) => ({
    ...spec.layout,
    width,
    font: { family: "system-ui, sans-serif", size: narrow() ? 11 : 12 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 48, r: 24, t: 8, b: 40 },
    dragmode: touch ? false : "zoom",
    hovermode: "closest",
    xaxis: axis(spec.layout.xaxis),
    yaxis: axis(spec.layout.yaxis),
    showlegend: false, // the page has its own
  });
  const draw = (width) => {
    const drawn = specs.map((spec) => {
      const place = document.getElementById(spec.id);
      return Plotly.react(place, spec.data, layoutOf(spec, width || place.clientWidth), { displayModeBar: false });
    });
    return Promise.all(drawn);
  };
  await draw();
  document.documentElement.dataset.charts = "drawn";

  let wide = innerWidth, waiting;
  addEventListener("resize", () => {
    if (innerWidth === wide) return;
    wide = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(() => draw(), 100);
  });
  // Paper is narrower than a window: A4 within its margins has 182 mm.
  addEventListener("beforeprint", () => draw(680));
  addEventListener("afterprint", () => draw());
})();
