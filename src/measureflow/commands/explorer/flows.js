// The library's formulas for the explorer's toys. tests/commands/test_explorer.py compares each with measureflow.
// θ of N particles in J dimensions is one flat array: coordinate j of particle i is x[i * J + j].
const flows = (() => {
  'use strict';
  const TAU = 2 * Math.PI;

  // ---- The toys: ℓ, P = N(0, 1) or flat, the grid of exact minimisers, and the step size η.
  const toys = {
    line: { J: 1, low: -5, cells: 361, spacing: 0.025, gaussian: true, eta: 0.01, centres: [] },
    plane: { J: 2, low: -7, cells: 57, spacing: 0.25, gaussian: false, eta: 0.05,
             centres: [[3, 3], [3, -3], [-3, 3], [-3, -3]] },
  };
  // A well that was added to the line: −depth·exp(−(θ − c)²/(2 width²)).
  const WELL = { depth: 3, width: 0.35 };

  /** ℓ(θ), and ∇ℓ(θ) into `out` where it is given. */
  function loss(problem, theta, out) {
    if (problem.toy === 'line') {
      const t = theta[0];
      let value = 1.5 * (t ** 4 / 4 + t ** 3 / 3 - t * t) - 3 / 8, slope = 1.5 * (t ** 3 + t * t - 2 * t);
      for (const [c] of problem.centres) {
        const dip = WELL.depth * Math.exp(-((t - c) ** 2) / (2 * WELL.width ** 2));
        value -= dip;
        slope += dip * (t - c) / WELL.width ** 2;
      }
      if (out) out[0] = slope;
      return value;
    }
    // −log Σᵢ N(θ; μᵢ, I)/K, seen from the nearest mode so that nothing underflows.
    const { centres } = problem, square = c => (theta[0] - c[0]) ** 2 + (theta[1] - c[1]) ** 2;
    let nearest = Infinity, total = 0, first = 0, second = 0;
    for (const c of centres) nearest = Math.min(nearest, square(c));
    for (const c of centres) {
      const share = Math.exp((nearest - square(c)) / 2);
      total += share;
      first += share * c[0];
      second += share * c[1];
    }
    if (out) {
      out[0] = theta[0] - first / total;
      out[1] = theta[1] - second / total;
    }
    return Math.log(TAU * centres.length) + nearest / 2 - Math.log(total);
  }

  /** V = ℓ − kl·log p − 2·mmd·μ_P, and ∇V into `out`; a flat P adds constants only. */
  function potential(problem, theta, out) {
    let value = loss(problem, theta, out);
    if (!toys[problem.toy].gaussian) return value;
    const t = theta[0], sigma2 = problem.lengthscale ** 2;
    const embedding = Math.sqrt(sigma2 / (sigma2 + 1)) * Math.exp(-t * t / (2 * (sigma2 + 1)));
    value += problem.kl * (t * t + Math.log(TAU)) / 2 - 2 * problem.mmd * embedding;
    if (out) out[0] += problem.kl * t + 2 * problem.mmd * embedding * t / (sigma2 + 1);
    return value;
  }

  /** Calls visit(i, j, κ(θᵢ, θⱼ)) for every pair, itself included; κ = exp(−‖θᵢ − θⱼ‖²/(2h²)). */
  function pairs(x, J, h, visit) {
    const n = x.length / J, scale = -1 / (2 * h * h);
    for (let i = 0; i < n; i++) {
      visit(i, i, 1);
      for (let j = 0; j < i; j++) {
        let square = 0;
        for (let k = 0; k < J; k++) square += (x[i * J + k] - x[j * J + k]) ** 2;
        const value = Math.exp(scale * square);
        visit(i, j, value);
        visit(j, i, value);
      }
    }
  }

  /** Σⱼ wⱼ κ(θᵢ, θⱼ) and Σⱼ wⱼ ∇₁κ(θᵢ, θⱼ). */
  function kernelSums(x, J, h, weights) {
    const n = x.length / J, values = new Float64Array(n), slopes = new Float64Array(x.length);
    pairs(x, J, h, (i, j, k) => {
      const w = weights ? weights[j] * k : k;
      values[i] += w;
      for (let a = 0; a < J; a++) slopes[i * J + a] -= w * (x[i * J + a] - x[j * J + a]) / (h * h);
    });
    return [values, slopes];
  }

  /** f = ∇V + ∫∇₁W dQ at each particle, W = 2·mmd·κ: the drift without the entropy's part. */
  function drift(problem, x) {
    const { J } = toys[problem.toy], n = x.length / J, found = new Float64Array(x.length);
    const one = new Float64Array(J);
    for (let i = 0; i < n; i++) {
      potential(problem, x.subarray(i * J, (i + 1) * J), one);
      found.set(one, i * J);
    }
    if (problem.mmd > 0) {
      const [, slopes] = kernelSums(x, J, problem.lengthscale);
      for (let a = 0; a < x.length; a++) found[a] += 2 * problem.mmd * slopes[a] / n;
    }
    return found;
  }

  // ---- The entropy's part without noise: ∇log q̂ at each particle, with a kernel of bandwidth h.
  const scores = {
    KernelDensity(x, J, h) {
      const [values, slopes] = kernelSums(x, J, h);
      return slopes.map((slope, a) => slope / values[Math.floor(a / J)]);
    },
    Blob(x, J, h) {
      const [values, slopes] = kernelSums(x, J, h);
      const [, others] = kernelSums(x, J, h, values.map(value => 1 / value));
      return slopes.map((slope, a) => slope / values[Math.floor(a / J)] + others[a]);
    },
    SteinGradientEstimator(x, J, h, ridge = 0.01) {
      const n = x.length / J, gram = Array.from({ length: n }, () => new Float64Array(n));
      pairs(x, J, h, (i, j, k) => { gram[i][j] = k + (i === j ? ridge : 0); });
      // −(K + ridge·I)⁻¹ ∇K, (∇K)ᵢ = Σⱼ ∇₁k(θⱼ, θᵢ), which is −Σⱼ ∇₁k(θᵢ, θⱼ).
      return solve(gram, kernelSums(x, J, h)[1], J);
    },
  };

  /** A⁻¹b for a positive definite A, by Cholesky's factors, which overwrite A. */
  function solve(A, b, J) {
    const n = A.length, y = Float64Array.from(b);
    for (let i = 0; i < n; i++) {
      for (let j = 0; j <= i; j++) {
        let sum = A[i][j];
        for (let k = 0; k < j; k++) sum -= A[i][k] * A[j][k];
        A[i][j] = i === j ? Math.sqrt(sum) : sum / A[j][j];
      }
    }
    for (let a = 0; a < J; a++) {
      for (let i = 0; i < n; i++) {
        for (let k = 0; k < i; k++) y[i * J + a] -= A[i][k] * y[k * J + a];
        y[i * J + a] /= A[i][i];
      }
      for (let i = n - 1; i >= 0; i--) {
        for (let k = i + 1; k < n; k++) y[i * J + a] -= A[k][i] * y[k * J + a];
        y[i * J + a] /= A[i][i];
      }
    }
    return y;
  }

  /** What a flow descends, θ ← θ − η·(this): ∇_W F where the entropy is noise or an estimate, or Stein's sum. */
  function direction(problem, flow, x) {
    const { J } = toys[problem.toy], n = x.length / J, f = drift(problem, x), h = flow.bandwidth;
    if (flow.name === 'SteinFlow') {
      const found = new Float64Array(x.length);
      pairs(x, J, h, (i, j, k) => {
        for (let a = 0; a < J; a++) {
          const apart = (x[i * J + a] - x[j * J + a]) / (h * h);
          found[i * J + a] += k * (f[j * J + a] - problem.kl * apart) / n;
        }
      });
      return found;
    }
    if (problem.kl === 0 || !(flow.name in scores)) return f;
    const score = scores[flow.name](x, J, h);
    return f.map((value, a) => value + problem.kl * score[a]);
  }

  // ---- FD-GVI: L(Q) of independent Gaussians N(m, s²), and its gradient in (m, log s).
  /** Nodes and weights of N(0, 1): the trapezoidal rule, so fine since ℓ turns quickly from one mode to the next. */
  const NODES = Array.from({ length: 121 }, (_, i) => 0.1 * (i - 60));
  const WEIGHTS = NODES.map(z => 0.1 * Math.exp(-z * z / 2) / Math.sqrt(TAU));

  function gaussianValue(problem, mean, scale) {
    const { J, gaussian } = toys[problem.toy], { kl, mmd } = problem, sigma2 = problem.lengthscale ** 2;
    const ofMean = new Float64Array(J), ofLog = new Float64Array(J), slope = new Float64Array(J);
    let value = 0, own = 1, cross = 1;
    const count = NODES.length, z = new Float64Array(2), theta = new Float64Array(J);
    for (let node = 0; node < count ** J; node++) {
      const inner = node % count, outer = Math.floor(node / count);
      const weight = WEIGHTS[inner] * (J === 2 ? WEIGHTS[outer] : 1);
      z[0] = NODES[inner];
      z[1] = NODES[outer];
      for (let a = 0; a < J; a++) theta[a] = mean[a] + scale[a] * z[a];
      value += weight * loss(problem, theta, slope);
      for (let a = 0; a < J; a++) {
        ofMean[a] += weight * slope[a];
        ofLog[a] += weight * slope[a] * z[a] * scale[a];
      }
    }
    for (let a = 0; a < J; a++) {
      own *= Math.sqrt(sigma2 / (sigma2 + 2 * scale[a] ** 2));
      const wide = sigma2 + scale[a] ** 2 + 1;
      cross *= Math.sqrt(sigma2 / wide) * Math.exp(-(mean[a] ** 2) / (2 * wide));
    }
    for (let a = 0; a < J; a++) {
      const s2 = scale[a] ** 2, m = mean[a], wide = sigma2 + s2 + 1;
      // KL(Q, P), which is −H(Q) for a flat P; MMD²(Q, P), which is ∬κ dQdQ then.
      value += kl * (gaussian ? (s2 + m * m - 1) / 2 - Math.log(scale[a]) : -Math.log(scale[a]) - (1 + Math.log(TAU)) / 2);
      ofLog[a] += kl * ((gaussian ? s2 : 0) - 1) - mmd * own * 2 * s2 / (sigma2 + 2 * s2);
      if (gaussian) {
        ofMean[a] += kl * m + 2 * mmd * cross * m / wide;
        ofLog[a] -= 2 * mmd * cross * (m * m * s2 / wide ** 2 - s2 / wide);
      }
    }
    value += mmd * (gaussian ? own - 2 * cross + Math.sqrt(sigma2 / (sigma2 + 2)) : own);
    return { value, ofMean, ofLog };
  }

  // ---- Birth and death: (δF/δQ − its mean)/τ at each particle, q̂ in coordinates that the particles whiten.
  function excess(problem, x) {
    const { J } = toys[problem.toy], n = x.length / J;
    const values = kernelSums(x, J, problem.lengthscale)[0], density = logDensity(x, J);
    const found = density.map((log, i) =>
      (potential(problem, x.subarray(i * J, (i + 1) * J)) + 2 * problem.mmd * values[i] / n) / problem.kl + log);
    const mean = found.reduce((a, b) => a + b) / n;
    return found.map(value => value - mean);
  }

  function logDensity(x, J) {
    const n = x.length / J, width = n ** (-1 / (J + 4)), mean = new Float64Array(J), z = new Float64Array(x.length);
    x.forEach((value, a) => { mean[a % J] += value / n; });
    const C = Array.from({ length: J }, () => new Float64Array(J));
    for (let i = 0; i < n; i++)
      for (let a = 0; a < J; a++)
        for (let b = 0; b < J; b++) C[a][b] += (x[i * J + a] - mean[a]) * (x[i * J + b] - mean[b]) / n;
    const ridge = 1e-6 * C.reduce((sum, row, a) => sum + row[a], 0) / J + 1e-12;
    const first = Math.sqrt(C[0][0] + ridge), second = J === 2 ? C[1][0] / first : 0;
    const last = J === 2 ? Math.sqrt(C[1][1] + ridge - second * second) : 1;
    for (let i = 0; i < n; i++) {
      z[i * J] = (x[i * J] - mean[0]) / first / width;
      if (J === 2) z[i * J + 1] = ((x[i * J + 1] - mean[1]) / width - second * z[i * J]) / last;
    }
    return kernelSums(z, J, 1)[0].map(Math.log);
  }

  /** Those above the mean die and copy any other; those below are copied over any other. */
  function birthsAndDeaths(rates, x, J, random) {
    const before = x.slice(), n = rates.length;
    const happens = rates.map(rate => random.uniform() < -Math.expm1(-Math.abs(rate)));
    const others = Array.from(rates, () => Math.floor(random.uniform() * n));
    const copy = (to, from) => x.set(before.subarray(from * J, (from + 1) * J), to * J);
    for (let i = 0; i < n; i++) if (happens[i] && rates[i] > 0) copy(i, others[i]);
    for (let i = 0; i < n; i++) if (happens[i] && rates[i] < 0) copy(others[i], i);
  }

  // ---- L(Q) of particles: exact but for the entropy, which is that of distances to the fifth neighbour.
  const NEIGHBOUR = 5;
  /** As the library does, null where particles are too few for an entropy: N ≥ 20·2ᴶ. */
  function value(problem, x) {
    const { J, gaussian } = toys[problem.toy], n = x.length / J, sigma2 = problem.lengthscale ** 2;
    if (problem.kl > 0 && n < 20 * 2 ** J) return null;
    // V has the cross terms of both divergences.
    let total = 0;
    for (let i = 0; i < n; i++) total += potential(problem, x.subarray(i * J, (i + 1) * J)) / n;
    if (problem.mmd > 0) {
      const own = kernelSums(x, J, problem.lengthscale)[0].reduce((a, b) => a + b) / (n * n);
      total += problem.mmd * (own + (gaussian ? Math.sqrt(sigma2 / (sigma2 + 2)) : 0));
    }
    return problem.kl > 0 ? total - problem.kl * entropy(x, J) : total;
  }

  /** ψ(N) − ψ(k) + log |B_J| + (J/N) Σᵢ log ρₖ(i) (Kozachenko and Leonenko). */
  function entropy(x, J) {
    const n = x.length / J, near = new Float64Array(NEIGHBOUR + 1);
    let psi = 0, logs = 0;
    for (let k = NEIGHBOUR; k < n; k++) psi += 1 / k;
    for (let i = 0; i < n; i++) {
      near.fill(Infinity);
      for (let j = 0; j < n; j++) {
        let square = 0, place = NEIGHBOUR;
        for (let a = 0; a < J; a++) square += (x[i * J + a] - x[j * J + a]) ** 2;
        if (square >= near[NEIGHBOUR]) continue;
        for (; place > 0 && near[place - 1] > square; place--) near[place] = near[place - 1];
        near[place] = square;
      }
      logs += Math.log(near[NEIGHBOUR]) / n;
    }
    return psi + Math.log(J === 1 ? 2 : Math.PI) + J * logs / 2;
  }

  // ---- Exact minimisers on the grid; `mass` is that of cells, and sums to 1.
  function Minimiser(problem) {
    const { J, low, cells, spacing, gaussian } = toys[problem.toy], { kl, mmd } = problem;
    const size = cells ** J, cell = spacing ** J, axis = Array.from({ length: cells }, (_, i) => low + spacing * i);
    const point = i => (J === 1 ? [axis[i]] : [axis[Math.floor(i / cells)], axis[i % cells]]);
    const V = Float64Array.from({ length: size }, (_, i) => potential(problem, point(i)));
    const profile = axis.map((_, i) => Math.exp(-((spacing * i) ** 2) / (2 * problem.lengthscale ** 2)));
    const constant = gaussian ? mmd * Math.sqrt(problem.lengthscale ** 2 / (problem.lengthscale ** 2 + 2)) : 0;

    /** ∫W dQ: the kernel is a product over coordinates, so that the plane takes two passes. */
    function interaction(mass) {
      if (mmd === 0) return new Float64Array(size);
      let field = mass;
      for (let pass = 0; pass < J; pass++) {
        const next = new Float64Array(size), lines = size / cells;
        for (let line = 0; line < lines; line++)
          for (let i = 0; i < cells; i++) {
            let sum = 0;
            for (let j = 0; j < cells; j++) sum += profile[Math.abs(i - j)] * field[line * cells + j];
            next[i * lines + line] = sum;  // transposed, so that the next pass takes the other axis
          }
        field = next;
      }
      return field.map(value => 2 * mmd * value);
    }
    const normalised = logs => {
      const top = logs.reduce((a, b) => Math.max(a, b));
      const norm = top + Math.log(logs.reduce((sum, log) => sum + Math.exp(log - top), 0));
      return logs.map(log => log - norm);
    };
    const energy = (mass, field) => mass.reduce((sum, m, i) => sum + m * (V[i] + field[i] / 2) +
      (kl > 0 && m > 0 ? kl * m * Math.log(m / cell) : 0), constant);

    const self = { point, axis, cell, V, residual: Infinity, done: false };
    let logs = normalised(kl > 0 ? V.map(v => -v / kl) : new Float64Array(size)), field, step = 1;
    const settle = () => {
      self.mass = logs.map(Math.exp);
      field = interaction(self.mass);
      self.value = energy(self.mass, field);
    };
    if (kl === 0 && mmd === 0) {
      const best = V.indexOf(Math.min(...V));
      logs = logs.map((_, i) => (i === best ? 0 : -Infinity));
      settle();
      Object.assign(self, { residual: 0, done: true });
    } else settle();

    /** One step of mirror descent: towards exp(−(V + ∫W dQ)/τ), or for τ = 0 along −δF/δQ. */
    function advance() {
      if (self.done) return;
      const variation = V.map((v, i) => v + field[i]);
      if (kl > 0) {
        const target = normalised(variation.map(u => -u / kl)), damping = 1 / (1 + 2 * mmd / kl);
        self.residual = logs.reduce((sum, log, i) => sum + Math.abs(Math.exp(log) - Math.exp(target[i])) / 2, 0);
        self.done = self.residual < 1e-7;
        logs = normalised(logs.map((log, i) => (1 - damping) * log + damping * target[i]));
        settle();
        return;
      }
      // The Frank–Wolfe gap bounds L(q) − L(q*) from above.
      self.residual = self.mass.reduce((sum, m, i) => sum + m * variation[i], 0) - variation.reduce((a, b) => Math.min(a, b));
      self.done = self.residual < 1e-5 * (1 + Math.abs(self.value));
      const kept = [logs, self.value];
      logs = normalised(logs.map((log, i) => log - step * variation[i]));
      settle();
      if (self.value <= kept[1] + 1e-13 * Math.abs(kept[1])) step *= 1.2;
      else { [logs] = kept; step /= 2; settle(); }
    }
    self.advance = (times = 1) => { for (let i = 0; i < times && !self.done; i++) advance(); return self; };
    return self;
  }

  /** Theorem 1: the minima of ℓ, and the Q₀-mass of the points that descend to them; Q₀ = N(start, I). */
  function theorem1(problem, start) {
    const { J, low, cells, spacing } = toys[problem.toy], slope = new Float64Array(J), atoms = [];
    let total = 0;
    for (let i = 0; i < cells ** J; i++) {
      // Between the points of the grid of minimisers, so that by symmetry none lies on the border of basins.
      const place = k => low + spacing * (k + 0.5);
      const theta = J === 1 ? [place(i)] : [place(Math.floor(i / cells)), place(i % cells)];
      const mass = Math.exp(-theta.reduce((sum, t, a) => sum + (t - (a ? 0 : start)) ** 2, 0) / 2);
      total += mass;
      if (mass < 1e-9) continue;
      for (let step = 0; step < 4000; step++) {
        loss(problem, theta, slope);
        const length = Math.hypot(...slope);
        if (length < 1e-7) break;
        const move = Math.min(J === 1 ? 0.02 : 0.5, spacing / length);
        theta.forEach((_, a) => { theta[a] -= move * slope[a]; });
      }
      const known = atoms.find(atom => Math.hypot(...theta.map((t, a) => t - atom.at[a])) < 0.02);
      if (known) known.mass += mass; else atoms.push({ at: theta, mass });
    }
    return atoms.map(({ at, mass }) => ({ at, mass: mass / total })).sort((a, b) => b.mass - a.mass);
  }

  // ---- Runs.
  /** Numbers that are the same for the same seed: mulberry32, and Box and Muller's normals. */
  function Random(seed) {
    let state = seed >>> 0, spare = null;
    const uniform = () => {
      state = (state + 0x6d2b79f5) >>> 0;
      let t = Math.imul(state ^ (state >>> 15), 1 | state);
      t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
      return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
    };
    const normal = () => {
      if (spare !== null) { const kept = spare; spare = null; return kept; }
      const radius = Math.sqrt(-2 * Math.log(1 - uniform())), angle = TAU * uniform();
      spare = radius * Math.sin(angle);
      return radius * Math.cos(angle);
    };
    return { uniform, normal, normals: count => Float64Array.from({ length: count }, normal) };
  }

  /** N draws of Q₀ = N(start, I), start moving the first coordinate. */
  function begin(problem, n, seed, start = 0) {
    const { J } = toys[problem.toy], random = Random(seed), draws = random.normals(n * J);
    const x = draws.map((z, a) => z + (a % J === 0 ? start : 0));
    const mean = Array.from({ length: J }, (_, a) => (a ? 0 : start));
    return { x, random, steps: 0, noise: null, velocity: null, draws, mean, scale: mean.map(() => 1) };
  }

  /** One step of a flow. */
  function step(problem, flow, state) {
    const { J, eta } = toys[problem.toy], { x, random } = state, tau = problem.kl;
    state.steps += 1;
    if (flow.name === 'ParametricFlow') {
      const { ofMean, ofLog } = gaussianValue(problem, state.mean, state.scale);
      state.mean = state.mean.map((m, a) => m - eta * ofMean[a]);
      state.scale = state.scale.map((s, a) => Math.max(s * Math.exp(-eta * ofLog[a]), 1e-6));
      state.draws.forEach((z, a) => { x[a] = state.mean[a % J] + state.scale[a % J] * z; });
      return;
    }
    const found = direction(problem, flow, x), noisy = tau > 0 && !(flow.name in scores) && flow.name !== 'SteinFlow';
    if (noisy && flow.name === 'KineticFlow') {
      // BAOAB with friction γ = 1; its η² is what η is to the others.
      const h = Math.sqrt(eta), kept = Math.exp(-h), size = Math.sqrt((1 - kept * kept) * tau);
      if (!state.velocity) state.velocity = random.normals(x.length).map(z => Math.sqrt(tau) * z);
      found.forEach((f, a) => {
        const kicked = state.velocity[a] - h * f;
        state.velocity[a] = kept * kicked + size * random.normal();
        x[a] += h / 2 * (kicked + state.velocity[a]);
      });
      return;
    }
    // Leimkuhler and Matthews: the mean of this step's noise and of the next.
    const before = noisy ? state.noise || random.normals(x.length) : null;
    state.noise = noisy ? random.normals(x.length) : null;
    found.forEach((f, a) => {
      x[a] += -eta * f + (noisy ? Math.sqrt(2 * eta * tau) * (before[a] + state.noise[a]) / 2 : 0);
    });
    if (flow.name === 'BirthDeath' && tau > 0)
      birthsAndDeaths(excess(problem, x).map(e => eta * e), x, J, random);
  }

  return { toys, WELL, loss, potential, drift, scores, direction, gaussianValue, excess, birthsAndDeaths, value,
           entropy, Minimiser, theorem1, Random, begin, step };
})();
