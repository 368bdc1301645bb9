(() => {
  const laws = JSON.parse(document.getElementById('laws').textContent), panel = document.getElementById('law');
  const esc = text => { const node = document.createElement('i'); node.textContent = text; return node.innerHTML; };
  const curve = law => {
    const n = law.d.length, high = Math.max(...law.d), at = i => 10 + 260 * i / (n - 1), up = d => 74 - 62 * d / high;
    const points = law.d.map((d, i) => at(i).toFixed(1) + ',' + up(d).toFixed(1)).join(' ');
    const y = 10 + 260 * Math.min(Math.max((law.y - law.a) / (law.b - law.a), -0.03), 1.03);
    return '<svg viewBox="0 0 280 92"><polygon class="band" points="10,74 ' + points + ' 270,74"/>' +
      '<polyline class="line one" points="' + points + '"/><line class="axis" x1="10" y1="74" x2="270" y2="74"/>' +
      '<line class="line two" x1="' + y + '" y1="8" x2="' + y + '" y2="74"/>' +
      '<text x="10" y="88">' + esc(law.as) + '</text><text x="270" y="88" text-anchor="end">' + esc(law.bs) + '</text></svg>';
  };
  const bars = law => '<svg viewBox="0 0 280 ' + (18 * law.p.length + 6) + '">' + law.p.map((p, i) =>
    '<text x="84" y="' + (18 * i + 14) + '" text-anchor="end">' + esc(law.c[i]) + '</text><line class="wide" x1="90" y1="' +
    (18 * i + 10) + '" x2="' + (90 + 140 * p) + '" y2="' + (18 * i + 10) + '"/><text x="' + (96 + 140 * p) + '" y="' +
    (18 * i + 14) + '">' + (100 * p).toFixed(1) + '%</text>').join('') + '</svg>';
  const show = dot => {
    const law = laws[dot.dataset.i];
    document.querySelectorAll('.dot.on').forEach(other => other.classList.remove('on'));
    document.querySelectorAll('.dot[data-i="' + dot.dataset.i + '"]').forEach(same => same.classList.add('on'));
    panel.innerHTML = '<b>' + esc(law.t) + '</b>' + esc(law.s) + (law.d ? curve(law) : bars(law));
    panel.hidden = false;
  };
  for (const kind of ['pointerover', 'click'])
    document.addEventListener(kind, event => {
      const dot = event.target.closest && event.target.closest('.dot[data-i]');
      if (dot) show(dot); else if (kind === 'click' && !panel.contains(event.target)) panel.hidden = true;
    });
  document.addEventListener('keydown', event => { if (event.key === 'Escape') panel.hidden = true; });
  // What is folded away has no size until it is unfolded.
  const folded = [...document.querySelectorAll('details:not([open])')];
  folded.forEach(part => { part.open = true; });
  const drawn = [...document.querySelectorAll('figure svg')].filter(svg => svg.getBBox().width > 100);
  folded.forEach(part => { part.open = false; });
  document.documentElement.dataset.drawn = drawn.length;
})();
