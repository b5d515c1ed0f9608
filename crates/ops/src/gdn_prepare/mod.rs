//! Before the gated delta rule: causal depthwise convolution of 4 taps, SiLU, l2 norm of q and k,
//! and the two gates.
//!
//! For channel c and the lane's row t: `y = Σ_j w[j, c] · u[t − 3 + j, c]`, then SiLU, where `u` is
//! the lane's stream of `qkv` rows; q and k heads are then divided by `sqrt(Σ u² + 1e-6)`, q also
//! multiplied by `dk^-½`. `g = decay · softplus(a + dt_bias)` (decay = −exp(A_log), so g ≤ 0) and
//! `beta = sigmoid(b)`. Source: arXiv 2412.06464 and `Qwen3_5GatedDeltaNet` in transformers.
//!
//! History: `history` is `[slots][2][3 + block][channels]` f32. Half `parity` holds what the lane's
//! previous pass left: 3 rows of history, then its rows. The three rows before this pass's first
//! are rows `pending .. pending + 3` of that half. This pass writes half `1 − parity`: those three
//! rows, then its own rows ([`Commit::Deferred`], at most `block`), or just the last three rows of
//! the lane's stream ([`Commit::Immediate`]; the next pass then has `pending = 0`). A lane of 0 rows
//! does the same with no rows of its own. Rows of the output that no lane owns are left alone.
//!
//! Numerics: f32; taps in ascending order by fused multiply-adds; an l2 norm sums squares over 16
//! lanes, then a fixed tree. The reference sums in f64.

mod host;

use crate::geometry::{f32_bytes, holds, is, records};
use crate::{Bindings, Buf, Cost, Cpu, LaneStep, Lanes, Mem, Op, Unsupported};

/// Which key head a value head reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadMap {
    /// h / (value_heads / key_heads): safetensors.
    Grouped,
    /// h mod key_heads: GGUF.
    Tiled,
}

/// Heads of a GatedDeltaNet layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GdnGeometry {
    /// Query and key heads.
    pub key_heads: usize,
    /// Value heads.
    pub value_heads: usize,
    /// Elements of a key head.
    pub key_dim: usize,
    /// Elements of a value head.
    pub value_dim: usize,
    /// Which key head a value head reads.
    pub head_map: HeadMap,
}

impl GdnGeometry {
    /// Width of all key heads.
    pub fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }
    /// Width of all value heads.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }
    /// Channels of the convolution: q, k and v.
    pub fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }
    /// The key head of value head `h`.
    pub fn key_head(&self, h: usize) -> usize {
        match self.head_map {
            HeadMap::Grouped => h / (self.value_heads / self.key_heads),
            HeadMap::Tiled => h % self.key_heads,
        }
    }
}

impl GdnGeometry {
    /// The largest head that the kernels hold in registers and on the stack.
    pub const MAX_DIM: usize = 256;

    /// What the GatedDeltaNet kernels can do.
    pub(crate) fn check(&self, op: &'static str) -> Result<(), Unsupported> {
        let GdnGeometry { key_heads, value_heads, key_dim, value_dim, .. } = *self;
        for (name, dim) in [("key_dim", key_dim), ("value_dim", value_dim)] {
            let ok = dim.is_multiple_of(16) && (16..=Self::MAX_DIM).contains(&dim);
            Unsupported::unless(ok, op, || format!("{name} {dim}"), "multiples of 16 up to 256")?;
        }
        let heads = key_heads > 0 && value_heads > 0 && value_heads.is_multiple_of(key_heads);
        let what = || format!("{value_heads} value heads, {key_heads} key heads");
        Unsupported::unless(heads, op, what, "value heads a multiple of key heads")?;
        let small = value_heads <= 1 << 16;
        Unsupported::unless(small, op, || format!("{value_heads} value heads"), "65536")
    }
}

/// When a pass's rows enter the recurrent state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Commit {
    /// In the lane's next pass, and only the rows kept by then (verify).
    Deferred,
    /// In this pass, all of them (prefill).
    Immediate,
}

/// Taps of the convolution.
pub const CONV_TAPS: usize = 4;

/// Added to the sum of squares of a query or key head.
const L2_EPS: f32 = 1e-6;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct GdnPrepare {
    /// `[rows, channels]` f32: q, k, v before the convolution.
    pub qkv: Buf,
    /// `[rows, value_heads]` f32.
    pub a: Buf,
    /// `[rows, value_heads]` f32.
    pub b: Buf,
    /// `[4, channels]` f32; tap 3 meets the row itself.
    pub conv: Buf,
    /// `[value_heads]` f32: −exp(A_log).
    pub decay: Buf,
    /// `[value_heads]` f32.
    pub dt_bias: Buf,
    /// `[slots][2][3 + block][channels]` f32.
    pub history: Buf,
    /// `[rows, keys]` f32.
    pub q: Buf,
    /// `[rows, keys]` f32.
    pub k: Buf,
    /// `[rows, values]` f32.
    pub v: Buf,
    /// `[rows, value_heads]` f32: log decay.
    pub g: Buf,
    /// `[rows, value_heads]` f32.
    pub beta: Buf,
    /// Rows and their lanes.
    pub lanes: Lanes,
    /// Heads.
    pub geometry: GdnGeometry,
    /// The most rows of a deferred pass.
    pub block: usize,
    /// When the rows enter the state.
    pub commit: Commit,
}

/// Which channels one head of the convolution has, and what becomes of them.
#[derive(Clone, Copy, Debug)]
enum Head {
    Query(usize),
    Key(usize),
    Value(usize),
}

impl GdnPrepare {
    /// Bytes of one slot's history, both halves.
    pub fn history_bytes(g: &GdnGeometry, block: usize) -> usize {
        2 * (CONV_TAPS - 1 + block) * g.channels() * 4
    }

    /// Row `row` of half `half` of a slot's history, as a buffer of one row of channels.
    fn history_row(&self, slot: usize, half: usize, row: usize) -> Buf {
        let height = CONV_TAPS - 1 + self.block;
        assert!(half < 2 && row < height, "history row {row} of half {half}, of {height} rows");
        self.history.rows((slot * 2 + half) * height + row, 1, 4 * self.geometry.channels())
    }

    /// Row `t` of a lane's stream, counted from the first row of this pass: from −3, which are
    /// history.
    fn stream_row(&self, step: &LaneStep, t: isize) -> Buf {
        match usize::try_from(t) {
            Ok(t) => self.qkv.rows(step.row0 as usize + t, 1, 4 * self.geometry.channels()),
            Err(_) => {
                let row = step.pending as usize + (t + (CONV_TAPS - 1) as isize) as usize;
                self.history_row(step.slot as usize, step.parity as usize, row)
            }
        }
    }

    /// The rows of a lane's stream that this pass writes to the other half: `(first, count)`.
    fn kept_rows(&self, step: &LaneStep) -> (isize, usize) {
        let history = CONV_TAPS - 1;
        match self.commit {
            Commit::Deferred => (-(history as isize), history + step.rows as usize),
            Commit::Immediate => (step.rows as isize - history as isize, history),
        }
    }

    /// Heads of the convolution, in channel order.
    fn conv_heads(&self) -> usize {
        2 * self.geometry.key_heads + self.geometry.value_heads
    }

    fn conv_head(&self, index: usize) -> Head {
        let keys = self.geometry.key_heads;
        match index {
            i if i < keys => Head::Query(i),
            i if i < 2 * keys => Head::Key(i - keys),
            i => Head::Value(i - 2 * keys),
        }
    }

    /// First channel and channels of a head.
    fn channels_of(&self, head: Head) -> (usize, usize) {
        let g = &self.geometry;
        match head {
            Head::Query(i) => (i * g.key_dim, g.key_dim),
            Head::Key(i) => (g.keys() + i * g.key_dim, g.key_dim),
            Head::Value(i) => (2 * g.keys() + i * g.value_dim, g.value_dim),
        }
    }

    /// Where a head's row goes.
    fn out_row(&self, head: Head, row: usize) -> Buf {
        let g = &self.geometry;
        let (buf, i, heads, dim) = match head {
            Head::Query(i) => (self.q, i, g.key_heads, g.key_dim),
            Head::Key(i) => (self.k, i, g.key_heads, g.key_dim),
            Head::Value(i) => (self.v, i, g.value_heads, g.value_dim),
        };
        buf.rows(row * heads + i, 1, 4 * dim)
    }
}

impl Op for GdnPrepare {
    fn name(&self) -> &'static str {
        "gdn_prepare"
    }

    fn bind(&self, b: &mut Bindings) {
        b.read("qkv", self.qkv);
        b.read("a", self.a);
        b.read("b", self.b);
        b.read("conv", self.conv);
        b.read("decay", self.decay);
        b.read("dt_bias", self.dt_bias);
        b.read("step", self.lanes.step);
        b.update("history", self.history);
        b.write("q", self.q);
        b.write("k", self.k);
        b.write("v", self.v);
        b.write("g", self.g);
        b.write("beta", self.beta);
    }

    fn check(&self) -> Result<(), Unsupported> {
        let (op, g, rows) = (self.name(), &self.geometry, self.lanes.rows);
        g.check(op)?;
        self.lanes.check(op)?;
        let fits = self.commit == Commit::Immediate || self.lanes.max_rows <= self.block;
        let what = || format!("{} rows of a lane", self.lanes.max_rows);
        Unsupported::unless(fits, op, what, "at most `block` when deferred")?;
        let height = self.block.checked_add(CONV_TAPS - 1);
        let slot = height.and_then(|height| f32_bytes(&[2, height, g.channels()]));
        let slots = records(self.history, slot).is_some_and(|slots| slots > 0);
        let what = || format!("history of {} bytes, block {}", self.history.bytes, self.block);
        Unsupported::unless(slots, op, what, "[slots][2][3 + block][channels] f32")?;
        let sizes = holds(self.qkv, &[rows, g.channels()])
            && [self.a, self.b, self.g, self.beta]
                .iter()
                .all(|&x| holds(x, &[rows, g.value_heads]))
            && is(self.conv, &[CONV_TAPS, g.channels()])
            && is(self.decay, &[g.value_heads])
            && is(self.dt_bias, &[g.value_heads])
            && holds(self.q, &[rows, g.keys()])
            && holds(self.k, &[rows, g.keys()])
            && holds(self.v, &[rows, g.values()]);
        Unsupported::unless(sizes, op, || format!("{self:?}"), "matching buffer sizes")
    }

    fn cost(&self) -> Cost {
        let (g, rows) = (&self.geometry, self.lanes.rows);
        let history = match self.commit {
            Commit::Deferred => 2 * (CONV_TAPS - 1) * self.lanes.count + rows,
            Commit::Immediate => 2 * (CONV_TAPS - 1) * self.lanes.count,
        };
        Cost {
            weight_bytes: (4 * (CONV_TAPS * g.channels() + 2 * g.value_heads)) as u64,
            other_bytes: (4 * ((2 * rows + history) * g.channels() + 4 * rows * g.value_heads))
                as u64,
            flops: (rows * (12 * g.channels() + 6 * g.value_heads)) as u64,
        }
    }

    fn reference(&self, mem: &Mem) {
        for step in self.lanes.steps(mem) {
            self.reference_gates(mem, step);
            for index in 0..self.conv_heads() {
                self.reference_head(mem, step, self.conv_head(index));
            }
            let (first, count) = self.kept_rows(step);
            for i in 0..count {
                let from = mem.get::<f32>(self.stream_row(step, first + i as isize));
                let half = 1 - step.parity as usize;
                let to = self.history_row(step.slot as usize, half, i);
                mem.get_mut::<f32>(to).copy_from_slice(from);
            }
        }
    }

    fn host(&self, mem: &Mem, cpu: &Cpu) {
        host::run(self, mem, cpu);
    }
}

impl GdnPrepare {
    fn reference_gates(&self, mem: &Mem, step: &LaneStep) {
        let heads = self.geometry.value_heads;
        let (decay, dt_bias) = (mem.get::<f32>(self.decay), mem.get::<f32>(self.dt_bias));
        for row in step.row0 as usize..(step.row0 + step.rows) as usize {
            let part = |buf: Buf| buf.rows(row, 1, 4 * heads);
            let (a, b) = (mem.get::<f32>(part(self.a)), mem.get::<f32>(part(self.b)));
            let (g, beta) = (mem.get_mut::<f32>(part(self.g)), mem.get_mut::<f32>(part(self.beta)));
            for h in 0..heads {
                let x = f64::from(a[h]) + f64::from(dt_bias[h]);
                let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
                g[h] = (f64::from(decay[h]) * softplus) as f32;
                beta[h] = (1.0 / (1.0 + (-f64::from(b[h])).exp())) as f32;
            }
        }
    }

    fn reference_head(&self, mem: &Mem, step: &LaneStep, head: Head) {
        let (start, dim) = self.channels_of(head);
        let (conv, channels) = (mem.get::<f32>(self.conv), self.geometry.channels());
        for t in 0..step.rows as usize {
            let out = mem.get_mut::<f32>(self.out_row(head, step.row0 as usize + t));
            for c in 0..dim {
                let tap = |j: usize| {
                    let row = t as isize + j as isize - (CONV_TAPS - 1) as isize;
                    let u = mem.get::<f32>(self.stream_row(step, row))[start + c];
                    f64::from(conv[j * channels + start + c]) * f64::from(u)
                };
                let y: f64 = (0..CONV_TAPS).map(tap).sum();
                out[c] = (y / (1.0 + (-y).exp())) as f32;
            }
            let squares: f64 = out.iter().map(|&u| f64::from(u) * f64::from(u)).sum();
            let norm = 1.0 / (squares + f64::from(L2_EPS)).sqrt();
            let scale = match head {
                Head::Query(_) => norm / (dim as f64).sqrt(),
                Head::Key(_) => norm,
                Head::Value(_) => continue,
            };
            out.iter_mut().for_each(|u| *u = (f64::from(*u) * scale) as f32);
        }
    }
}

#[cfg(any(test, feature = "cases"))]
pub(crate) mod cases;
