// The page: controls, the loop, and two canvases. All mathematics is in flows.js.
(() => {
  'use strict';
  const find = id => document.getElementById(id), root = document.documentElement;
  const COLOURS = JSON.parse(find('colours').textContent), SLIDERS = ['kl', 'mmd', 'lengthscale', 'n', 'start', 'speed', 'bandwidth'];
  const settings = { toy: 'line', kl: 0, mmd: 0, lengthscale: 0.7, n: 200, start: 0, speed: 4, bandwidth: 0.3,
                     flow: 'WassersteinFlow', seed: 1 };
  const VIEW = { line: [-3.6, 2.6], plane: [-7, 7] }, BIN = 0.125, MOST = 800, MOST_CENTRES = 10;
  // Steps of the mirror descent per picture, and milliseconds that the steps of a picture may take.
  const SOLVER_STEPS = 40, BUDGET = 25;
  let added = [], state, solver, limit, history, running = false;

  const problem = () => ({ toy: settings.toy, kl: settings.kl, mmd: settings.mmd, lengthscale: settings.lengthscale,
                           centres: [...flows.toys[settings.toy].centres, ...added] });
  const flow = () => ({ name: settings.flow, bandwidth: settings.bandwidth });
  const method = () => (settings.flow === 'ParametricFlow' ? 'FD-GVI'
    : settings.mmd > 0 ? (settings.kl > 0 ? 'DRLE' : 'DRE') : settings.kl > 0 ? 'DLE' : 'DE');
  const number = value => (Number.isFinite(value) ? value.toFixed(3).replace('-', '−') : '–');

  // ---- The loop.
  function restart() {
    state = flows.begin(problem(), settings.n, settings.seed, settings.start);
    restate();
  }
  /** What is minimised has changed: the particles stay where they are. */
  function restate() {
    solver = flows.Minimiser(problem());
    limit = settings.kl === 0 && settings.mmd === 0 ? flows.theorem1(problem(), settings.start) : [];
    history = [];
    record();
    show();
    draw();
    if (!running && !solver.done) requestAnimationFrame(frame);
  }
  function record() {
    const value = settings.flow === 'ParametricFlow' ? flows.gaussianValue(problem(), state.mean, state.scale).value
      : flows.value(problem(), state.x);
    history.push([state.steps, value]);
    // Twice as sparse, whenever it becomes long.
    if (history.length > 600) history = history.filter((_, i) => i % 2 === 0);
  }
  function frame() {
    solver.advance(SOLVER_STEPS);
    if (running) {
      const began = performance.now();
      for (let i = 0; i < settings.speed && performance.now() - began < BUDGET; i++) flows.step(problem(), flow(), state);
      record();
      if (!state.x.every(Number.isFinite)) { running = false; say('The particles became infinite: press Restart.'); }
    }
    draw();
    if (running || !solver.done) requestAnimationFrame(frame);
  }
  function run(on) {
    const asleep = !running && solver.done;
    running = on;
    find('run').textContent = running ? 'Pause' : 'Run';
    if (running && asleep) requestAnimationFrame(frame);
  }

  // ---- Controls.
  function say(text) { find('said').textContent = text; }
  function show() {
    for (const id of SLIDERS) {
      find(id).value = settings[id];
      find(id).previousElementSibling.textContent = settings[id];
    }
    for (const id of ['toy', 'flow']) find(id).value = settings[id];
    const name = method();
    root.style.setProperty('--method', COLOURS[name]);
    document.querySelectorAll('[data-method]').forEach(button =>
      button.setAttribute('aria-pressed', button.dataset.method === name));
    find('picture').className = settings.toy;
    find('exact').textContent = name === 'DE' ? 'Theorem 1’s limit, and the minimiser ▼' : 'exact minimiser q*';
    find('distance-name').textContent = name === 'DE' ? 'W₁ to Theorem 1’s limit' : 'W₁ to q*';
    for (const id of ['distance-name', 'distance']) find(id).hidden = settings.toy === 'plane';
    find('bandwidth-of').hidden = !hasKernel();
    say(words(name));
  }
  /** Whether a kernel stands for the entropy, in the place of noise. */
  const hasKernel = () => settings.flow in flows.scores || settings.flow === 'SteinFlow';
  function words(name) {
    if (settings.flow === 'ParametricFlow') return 'FD-GVI: the best Gaussian, by gradient descent on its mean and standard deviations; dots are draws of it.';
    const needs = ['KineticFlow', 'BirthDeath'].includes(settings.flow) && settings.kl === 0;
    if (needs) return `${settings.flow} needs a temperature: raise the weight of KL. Until then this is the plain descent.`;
    if (hasKernel() && settings.kl > 0)
      return `${name} by ${settings.flow}: nothing is random. A kernel stands for the entropy, and spreads few particles evenly; Theorem 2 is about noise.`;
    return { DE: 'Deep ensemble: each particle descends ℓ alone.',
             DLE: 'Deep Langevin ensemble: descent and noise. The minimiser is the Gibbs measure q* ∝ exp(−ℓ/τ) p.',
             DRE: 'Deep repulsive ensemble: descent and repulsion. The minimiser is unique, but particles may come to rest elsewhere.',
             DRLE: 'Deep repulsive Langevin ensemble: descent, repulsion and noise. Theorem 2: q* as N, t → ∞.' }[name];
  }
  for (const id of SLIDERS) {
    find(id).addEventListener('input', event => {
      settings[id] = Number(event.target.value);
      if (id === 'n' || id === 'start') restart(); else if (id === 'speed') show(); else restate();
    });
  }
  find('flow').addEventListener('change', event => {
    settings.flow = event.target.value;
    Object.assign(state, { noise: null, velocity: null });
    // A Gaussian has no particles to go on with, nor do they have a Gaussian.
    restart();
  });
  find('toy').addEventListener('change', event => {
    settings.toy = event.target.value;
    added = [];
    restart();
  });
  document.querySelectorAll('[data-method]').forEach(button => button.addEventListener('click', () => {
    const name = button.dataset.method, plane = settings.toy === 'plane';
    settings.kl = name.includes('L') ? settings.kl || (plane ? 0.2 : 1) : 0;
    settings.mmd = name.includes('R') ? settings.mmd || (plane ? 0.3 : 0.5) : 0;
    if (settings.flow === 'ParametricFlow') { settings.flow = 'WassersteinFlow'; restart(); } else restate();
  }));
  // The guided steps, each by its own button and one after the other.
  const steps = [...document.querySelectorAll('.steps li')];
  let next = 0;
  function take(place) {
    const item = steps[place];
    Object.assign(settings, JSON.parse(item.dataset.settings));
    added = [];
    next = (place + 1) % steps.length;
    steps.forEach(other => other.classList.toggle('on', other === item));
    find('next').textContent = next ? `Next step: ${next + 1} of ${steps.length}` : 'From the first step again';
    restart();
    run(true);
    find('said').innerHTML = `<b>${place + 1}. ${item.querySelector('h3').innerHTML}.</b> ${item.querySelector('p').innerHTML}`;
  }
  steps.forEach((item, place) => {
    const button = document.createElement('button');
    button.textContent = 'Show me';
    item.append(button);
    button.addEventListener('click', () => { take(place); find('picture').scrollIntoView({ block: 'center' }); });
  });
  find('next').addEventListener('click', () => take(next));
  find('run').addEventListener('click', () => run(!running));
  find('restart').addEventListener('click', restart);
  find('seed').addEventListener('click', () => { settings.seed += 1; restart(); });
  find('clear').addEventListener('click', () => { added = []; restart(); });
  find('picture').addEventListener('click', event => {
    const box = find('picture').getBoundingClientRect(), J = flows.toys[settings.toy].J, at = places(box.width, box.height);
    const theta = [at.back(event.clientX - box.left), at.up && at.up(event.clientY - box.top)].slice(0, J);
    if (find('adds').value === 'well') {
      if (added.length === MOST_CENTRES) return say(`At most ${MOST_CENTRES} can be added.`);
      added.push(theta);
      return restate();
    }
    if (settings.flow === 'ParametricFlow') return say('A Gaussian has no particles to add to: choose another flow.');
    if (state.x.length / J + 10 > MOST) return say(`There are ${MOST} particles at most.`);
    const more = state.random.normals(10 * J).map((z, a) => theta[a % J] + 0.1 * z);
    state.x = Float64Array.from([...state.x, ...more]);
    Object.assign(state, { noise: null, velocity: null });
    record();
    return draw();
  });

  // ---- Pictures.
  const ink = name => getComputedStyle(root).getPropertyValue(name).trim();
  function sheet(id) {
    const canvas = find(id), ratio = window.devicePixelRatio || 1, { width, height } = canvas.getBoundingClientRect();
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const pen = canvas.getContext('2d');
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = '12px system-ui, sans-serif';
    return { pen, width, height };
  }
  /** From θ to pixels, and back. */
  function places(width, height) {
    const [low, high] = VIEW[settings.toy];
    if (settings.toy === 'line')
      return { x: t => (t - low) / (high - low) * width, back: px => low + px / width * (high - low) };
    const size = Math.min(width, height) / (high - low), left = width / 2, middle = height / 2;
    return { size, x: t => left + t * size, y: t => middle - t * size, back: px => (px - left) / size, up: py => (middle - py) / size };
  }
  function draw() {
    const board = sheet('picture');
    (settings.toy === 'line' ? drawLine : drawPlane)(board, places(board.width, board.height));
    drawEnergy(sheet('energy'));
    drawNumbers();
  }
  /** Densities over bins, of weights at places. */
  function binned(values, weights) {
    const bins = new Map();
    values.forEach((value, i) => {
      const bin = Math.round(value / BIN);
      bins.set(bin, (bins.get(bin) || 0) + weights(i) / BIN);
    });
    return bins;
  }
  function drawLine({ pen, width, height }, { x }) {
    const strip = 34, floor = height - strip - 18, J = 1, n = state.x.length, name = method();
    const found = binned(state.x, () => 1 / n), density = solver.mass.map(m => m / solver.cell);
    const atoms = name === 'DE' ? binned(limit.map(a => a.at[0]), i => limit[i].mass) : null;
    const exact = name === 'DE' ? atoms : settings.kl > 0 ? null : binned(solver.axis, i => solver.mass[i]);
    const tops = [...(exact ? exact.values() : density), ...found.values()];
    const top = Math.max(0.8, Math.min(Math.max(...tops), 7)), y = d => floor - Math.min(d / top, 1) * (floor - 44);
    // The loss, in a scale of its own.
    const [low, high] = VIEW.line, inside = [...solver.axis.keys()].filter(i => solver.axis[i] > low && solver.axis[i] < high);
    const losses = inside.map(i => flows.loss(problem(), [solver.axis[i]])), least = Math.min(...losses);
    pen.strokeStyle = ink('--mark');
    pen.lineWidth = 1.5;
    pen.beginPath();
    inside.forEach((i, k) => pen.lineTo(x(solver.axis[i]), floor - 8 - (losses[k] - least) / 7 * (floor - 40)));
    pen.stroke();
    // The exact minimiser, under the particles.
    pen.fillStyle = ink('--ink');
    pen.strokeStyle = ink('--ink');
    if (name !== 'DE') {
      pen.beginPath();
      pen.moveTo(x(low), floor);
      if (exact) {
        for (let bin = Math.round(low / BIN); bin <= high / BIN; bin++) {
          pen.lineTo(x((bin - 0.5) * BIN), y(exact.get(bin) || 0));
          pen.lineTo(x((bin + 0.5) * BIN), y(exact.get(bin) || 0));
        }
      } else inside.forEach(i => pen.lineTo(x(solver.axis[i]), y(density[i])));
      pen.lineTo(x(high), floor);
      pen.globalAlpha = 0.16;
      pen.fill();
      pen.globalAlpha = 1;
      pen.setLineDash([5, 4]);
      pen.lineWidth = 1.5;
      pen.stroke();
      pen.setLineDash([]);
    }
    // The particles: how many in each bin, and each of them below.
    pen.fillStyle = ink('--method');
    pen.globalAlpha = 0.55;
    for (const [bin, d] of found) pen.fillRect(x((bin - 0.5) * BIN) + 0.5, y(d), x(BIN) - x(0) - 1, floor - y(d));
    pen.globalAlpha = 0.8;
    for (let i = 0; i < n; i++) {
      pen.beginPath();
      pen.arc(x(state.x[i * J]), floor + 8 + (i * 7) % 23, 2.6, 0, 7);
      pen.fill();
    }
    pen.globalAlpha = 1;
    if (name === 'DE') drawLimit(pen, { x, y, floor });
    drawAxis(pen, [-3, -2, -1, 0, 1, 2], x, height - 4, floor, width);
  }
  /** Theorem 1's atoms, as high as bars of that mass; and where the minimiser has all of it. */
  function drawLimit(pen, { x, y, floor }) {
    pen.fillStyle = pen.strokeStyle = ink('--ink');
    pen.setLineDash([5, 4]);
    pen.lineWidth = 2;
    limit.forEach(({ at, mass }) => {
      pen.beginPath();
      pen.moveTo(x(at[0]), floor);
      pen.lineTo(x(at[0]), y(mass / BIN));
      pen.stroke();
      pen.textAlign = 'center';
      pen.fillText(`${(100 * mass).toFixed(0)}%`, x(at[0]), y(mass / BIN) - 6);
    });
    pen.setLineDash([]);
    const best = x(solver.axis[solver.mass.indexOf(1)]);
    pen.textAlign = 'left';
    pen.fillText('▼ minimiser', best - 5, 14);
  }
  function drawAxis(pen, ticks, x, bottom, floor, width) {
    pen.strokeStyle = ink('--mark');
    pen.fillStyle = ink('--muted');
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(0, floor + 0.5);
    pen.lineTo(width, floor + 0.5);
    pen.stroke();
    pen.textAlign = 'center';
    ticks.forEach(t => pen.fillText(String(t).replace('-', '−'), x(t), bottom));
    pen.fillText('θ', width - 8, bottom);
  }
  function drawPlane({ pen }, { x, y, size }) {
    const { cells, spacing, low } = flows.toys.plane, name = method();
    pen.strokeStyle = ink('--line');
    pen.strokeRect(x(-7), y(7), 14 * size, 14 * size);
    if (name !== 'DE') {
      // One pixel for each cell, made larger smoothly; the darkest is the largest density.
      const image = document.createElement('canvas');
      image.width = image.height = cells;
      const small = image.getContext('2d'), data = small.createImageData(cells, cells), top = solver.mass.reduce((a, b) => Math.max(a, b));
      small.fillStyle = ink('--ink');
      small.fillRect(0, 0, 1, 1);
      const [r, g, b] = small.getImageData(0, 0, 1, 1).data;
      for (let i = 0; i < cells; i++)
        for (let j = 0; j < cells; j++)
          data.data.set([r, g, b, 120 * Math.sqrt(solver.mass[i * cells + j] / top)], 4 * ((cells - 1 - j) * cells + i));
      small.putImageData(data, 0, 0);
      const edge = low - spacing / 2, span = cells * spacing * size;
      pen.save();
      pen.beginPath();
      pen.rect(x(-7), y(7), 14 * size, 14 * size);
      pen.clip();
      pen.drawImage(image, x(edge), y(edge) - span, span, span);
      pen.restore();
    }
    // The loss: one and two standard deviations around each mode.
    pen.strokeStyle = ink('--mark');
    for (const [a, b] of problem().centres)
      for (const radius of [1, 2]) {
        pen.beginPath();
        pen.arc(x(a), y(b), radius * size, 0, 7);
        pen.stroke();
      }
    pen.fillStyle = ink('--method');
    pen.globalAlpha = 0.75;
    for (let i = 0; i < state.x.length; i += 2) {
      pen.beginPath();
      pen.arc(x(state.x[i]), y(state.x[i + 1]), 3, 0, 7);
      pen.fill();
    }
    pen.globalAlpha = 1;
    pen.fillStyle = ink('--ink');
    pen.textAlign = 'center';
    for (const { at, mass } of limit) pen.fillText(`${(100 * mass).toFixed(0)}%`, x(at[0]), y(at[1]) - 12);
  }
  function drawEnergy({ pen, width, height }) {
    const shown = history.filter(([, value]) => Number.isFinite(value)), left = 44, floor = height - 18;
    const values = [solver.value, ...shown.map(([, value]) => value)], low = Math.min(...values);
    // What a start far away costs would hide all else.
    const high = Math.min(Math.max(...values), solver.value + 4);
    const room = Math.max(high - low, 0.1), y = v => floor - 8 - (v - low) / room * (floor - 20);
    const first = history[0][0], last = Math.max(history[history.length - 1][0], first + 50), x = s => left + (s - first) / (last - first) * (width - left - 6);
    pen.fillStyle = ink('--muted');
    pen.textAlign = 'right';
    pen.fillText(number(low), left - 4, y(low) + 4);
    if (high - low > 0.15 * room) pen.fillText(number(high), left - 4, y(high) + 4);
    pen.textAlign = 'left';
    pen.fillText(shown.length ? 'time' : 'too few particles for an entropy', left, height - 3);
    pen.strokeStyle = ink('--ink');
    pen.setLineDash([5, 4]);
    pen.lineWidth = 1.3;
    pen.beginPath();
    pen.moveTo(left, y(solver.value));
    pen.lineTo(width, y(solver.value));
    pen.stroke();
    pen.setLineDash([]);
    pen.strokeStyle = ink('--method');
    pen.lineWidth = 2;
    pen.beginPath();
    shown.forEach(([steps, value]) => pen.lineTo(x(steps), y(value)));
    pen.stroke();
  }
  /** W₁ of the particles to the law on the grid, or to Theorem 1's atoms: ∫ |F − F*|. */
  function distance() {
    if (settings.toy !== 'line') return NaN;
    const atoms = method() === 'DE', points = Float64Array.from(state.x).sort(), { spacing } = flows.toys.line;
    let total = 0, below = 0, mass = 0;
    solver.axis.forEach((t, i) => {
      while (below < points.length && points[below] <= t + spacing / 2) below++;
      mass = atoms ? limit.reduce((sum, a) => sum + (a.at[0] <= t + spacing / 2 ? a.mass : 0), 0) : mass + solver.mass[i];
      total += Math.abs(below / points.length - mass) * spacing;
    });
    return total;
  }
  function drawNumbers() {
    const value = history[history.length - 1][1], far = distance(), { eta } = flows.toys[settings.toy];
    find('value').textContent = value === null ? 'needs more particles' : number(value);
    find('least').textContent = number(solver.value) + (solver.done ? '' : ' …');
    find('distance').textContent = number(far);
    find('time').textContent = `${(state.steps * eta).toFixed(1)}, ${state.steps}`;
    Object.assign(root.dataset, { method: method(), steps: state.steps, particles: state.x.length / flows.toys[settings.toy].J,
                                  value, least: solver.value, distance: far, centres: problem().centres.length });
  }
  window.addEventListener('resize', draw);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
  restart();
})();
