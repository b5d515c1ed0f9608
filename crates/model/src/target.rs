//! The target model: its weights, and the forward pass.

use std::ops::Range;

use ops::{
    Act, Attention, AttnMix, AttnPrepare, Buf, CopyRows, Device, Embed, GatedDelta, GatedNorm,
    GdnGeometry, GdnMix, GdnPrepare, HeadGate, Lanes, Linear, LinearPart, Pass, Queries, RmsNorm,
    Rope, SiluMul, Weight,
};

use crate::scratch::Scratch;
use crate::state::{Cell, State};

/// A hybrid decoder with its weights on a device.
#[derive(Debug)]
pub struct Target {
    /// `[vocab, hidden]`.
    pub embed: Weight,
    /// `[vocab, hidden]`; the embedding itself when tied.
    pub lm_head: Weight,
    /// `[hidden]` f32.
    pub final_norm: Buf,
    /// In order.
    pub layers: Vec<Layer>,
    /// Query heads, key/value heads, head size and rotary embedding of the attention layers.
    pub attention: AttentionShape,
    /// Heads of the GatedDeltaNet layers, if there are any.
    pub gdn: Option<GdnGeometry>,
    /// Of every norm.
    pub eps: f32,
    /// Ids at and above this are padding: never sampled.
    pub vocab: usize,
    /// Width of the MLPs.
    pub intermediate: usize,
}

/// What all attention layers share.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Whether the query projection carries an output gate.
    pub gated: bool,
    /// Rotary embedding.
    pub rope: Rope,
}

impl AttentionShape {
    /// Elements of a head's query projection: its query, and its gate if there is one.
    pub fn q_stride(&self) -> usize {
        if self.gated { 2 * self.head_dim } else { self.head_dim }
    }
}

/// One decoder layer.
#[derive(Debug)]
pub struct Layer {
    /// `[hidden]` f32.
    pub input_norm: Buf,
    /// Attention or GatedDeltaNet.
    pub mixer: Mixer,
    /// `[hidden]` f32, before the MLP.
    pub post_norm: Buf,
    /// SwiGLU.
    pub mlp: Mlp,
}

/// What mixes tokens.
#[derive(Debug)]
pub enum Mixer {
    /// Full attention; the index counts attention layers.
    Attention(usize, AttentionWeights),
    /// GatedDeltaNet; the index counts GatedDeltaNet layers.
    GatedDelta(usize, GdnWeights),
}

/// Weights of an attention layer.
#[derive(Debug)]
pub struct AttentionWeights {
    /// `[heads · (1 or 2) · head_dim, hidden]`: per head the query, then its gate.
    pub q: Weight,
    /// `[kv_heads · head_dim, hidden]`.
    pub k: Weight,
    /// `[kv_heads · head_dim, hidden]`.
    pub v: Weight,
    /// `[hidden, heads · head_dim]`.
    pub o: Weight,
    /// `[head_dim]` f32.
    pub q_norm: Option<Buf>,
    /// `[head_dim]` f32.
    pub k_norm: Option<Buf>,
}

/// Weights of a GatedDeltaNet layer.
#[derive(Debug)]
pub struct GdnWeights {
    /// `[channels, hidden]`: q, k, v.
    pub qkv: Weight,
    /// `[values, hidden]`: the output gate.
    pub z: Weight,
    /// `[value_heads, hidden]`: beta.
    pub b: Weight,
    /// `[value_heads, hidden]`: decay.
    pub a: Weight,
    /// `[hidden, values]`.
    pub out: Weight,
    /// `[4, channels]` f32.
    pub conv: Buf,
    /// `[value_heads]` f32: −exp(A_log).
    pub decay: Buf,
    /// `[value_heads]` f32.
    pub dt_bias: Buf,
    /// `[value_dim]` f32.
    pub norm: Buf,
}

/// Weights of a SwiGLU MLP.
#[derive(Debug)]
pub struct Mlp {
    /// `[intermediate, hidden]`.
    pub gate: Weight,
    /// `[intermediate, hidden]`.
    pub up: Weight,
    /// `[hidden, intermediate]`.
    pub down: Weight,
}

/// Runs the rows of a pass through the model. Token ids are in `scratch.ids`; logits of the rows in
/// `logits` are left in `scratch.logits`, taps of all rows in `scratch.features`.
///
/// A prompt's last token is run by its first round, whose logits choose the first token of the answer, so that they
/// are a round's whether the tokens before it were computed now or are from a cache.
pub fn forward(
    dev: &mut dyn Device,
    m: &Target,
    state: &State,
    s: &Scratch,
    lanes: Lanes,
    pass: Pass,
    logits: Range<usize>,
) {
    let rows = lanes.rows;
    dev.run(&Embed { ids: s.ids, table: m.embed, out: s.x, rows });
    for (i, layer) in m.layers.iter().enumerate() {
        norm(dev, s.x, layer.input_norm, s.xn, rows, pass, m.eps);
        match &layer.mixer {
            Mixer::Attention(k, w) => attention(dev, m, w, *k, state, s, lanes, pass),
            Mixer::GatedDelta(c, w) => gated_delta_net(dev, m, w, &state.cells[*c], s, lanes, pass),
        }
        norm(dev, s.x, layer.post_norm, s.xn, rows, pass, m.eps);
        mlp(dev, &layer.mlp, s, rows, pass);
        if let Some(tap) = s.taps.iter().position(|&layer| layer == i) {
            let (width, column) = (s.hidden, tap * s.hidden);
            let finish = tap + 1 == s.taps.len();
            dev.run(&CopyRows { from: s.x, width, to: s.features, column, finish, rows, pass });
        }
    }
    head(dev, m, s, logits, pass);
}

/// Final norm and vocabulary projection of some rows of the residual stream.
fn head(dev: &mut dyn Device, m: &Target, s: &Scratch, rows: Range<usize>, pass: Pass) {
    if rows.is_empty() {
        return;
    }
    let x = s.x.rows(rows.start, rows.len(), 4 * s.hidden);
    norm(dev, x, m.final_norm, s.xn, rows.len(), pass, m.eps);
    linear(dev, s.xn, rows.len(), pass, &[(m.lm_head, s.logits)]);
}

fn attention(
    dev: &mut dyn Device,
    m: &Target,
    w: &AttentionWeights,
    index: usize,
    state: &State,
    s: &Scratch,
    lanes: Lanes,
    pass: Pass,
) {
    let (shape, rows, b) = (&m.attention, lanes.rows, &s.attention);
    linear(dev, s.xn, rows, pass, &[(w.q, b.q_gate), (w.k, b.k), (w.v, b.v)]);
    let (stride, heads) = (shape.q_stride(), shape.heads);
    let prepare = AttnPrepare {
        queries: Some(Queries { q: b.q_gate, stride, norm: w.q_norm, heads, out: b.q }),
        k: b.k,
        v: b.v,
        k_norm: w.k_norm,
        rope: shape.rope,
        kv: state.kv[index],
        lanes,
        eps: m.eps,
    };
    let attention = Attention {
        q: b.q,
        kv: state.kv[index],
        out: b.mixed,
        scratch: b.partials,
        lanes,
        heads: shape.heads,
        scale: (shape.head_dim as f32).powf(-0.5),
        causal: true,
        window: None,
        pass,
    };
    let gate = HeadGate {
        x: b.mixed,
        q_gate: shape.gated.then_some(b.q_gate),
        out: b.gated,
        rows,
        heads: shape.heads,
        dim: shape.head_dim,
    };
    match pass {
        Pass::Round => dev.run(&AttnMix { prepare, attention, gate }),
        Pass::Prompt => {
            dev.run(&prepare);
            dev.run(&attention);
            dev.run(&gate);
        }
    }
    add_linear(dev, b.gated, rows, pass, w.o, s.x);
}

fn gated_delta_net(
    dev: &mut dyn Device,
    m: &Target,
    w: &GdnWeights,
    cell: &Cell,
    s: &Scratch,
    lanes: Lanes,
    pass: Pass,
) {
    let (rows, b) = (lanes.rows, &s.gdn);
    linear(dev, s.xn, rows, pass, &[(w.qkv, b.qkv), (w.z, b.z), (w.b, b.b), (w.a, b.a)]);
    let (prepare, delta) = recurrence(m, w, cell, s, lanes, pass);
    let dim = prepare.geometry.value_dim;
    let norm =
        GatedNorm { x: b.mixed, gate: b.z, weight: w.norm, out: b.gated, rows, dim, eps: m.eps };
    match pass {
        Pass::Round => dev.run(&GdnMix { prepare, delta, norm }),
        Pass::Prompt => {
            dev.run(&prepare);
            dev.run(&delta);
            dev.run(&norm);
        }
    }
    add_linear(dev, b.gated, rows, pass, w.out, s.x);
}

/// Convolution and recurrence of the projected rows.
fn recurrence(
    m: &Target,
    w: &GdnWeights,
    cell: &Cell,
    s: &Scratch,
    lanes: Lanes,
    pass: Pass,
) -> (GdnPrepare, GatedDelta) {
    let b = &s.gdn;
    let geometry = m.gdn.expect("a model with GatedDeltaNet layers has their geometry");
    let prepare = GdnPrepare {
        qkv: b.qkv,
        a: b.a,
        b: b.b,
        conv: w.conv,
        decay: w.decay,
        dt_bias: w.dt_bias,
        history: cell.history,
        q: b.q,
        k: b.k,
        v: b.v,
        g: b.g,
        beta: b.beta,
        lanes,
        geometry,
        block: cell.block,
        commit: pass.commit(),
    };
    let delta = GatedDelta {
        q: b.q,
        k: b.k,
        v: b.v,
        g: b.g,
        beta: b.beta,
        state: cell.state,
        pending: cell.pending,
        out: b.mixed,
        scratch: b.chunks,
        lanes,
        geometry,
        block: cell.block,
        commit: pass.commit(),
    };
    (prepare, delta)
}

/// A pass of lanes without rows, which only takes up what is pending. `lanes` counts one row, which
/// no lane owns.
pub fn take_up(dev: &mut dyn Device, m: &Target, state: &State, s: &Scratch, lanes: Lanes) {
    for layer in &m.layers {
        if let Mixer::GatedDelta(c, w) = &layer.mixer {
            let cell = &state.cells[*c];
            let (prepare, delta) = recurrence(m, w, cell, s, lanes, Pass::Prompt);
            dev.run(&prepare);
            dev.run(&delta);
        }
    }
}

/// SwiGLU over `scratch.xn`, added to the residual stream.
pub(crate) fn mlp(dev: &mut dyn Device, w: &Mlp, s: &Scratch, rows: usize, pass: Pass) {
    let b = &s.mlp;
    linear(dev, s.xn, rows, pass, &[(w.gate, b.gate), (w.up, b.up)]);
    dev.run(&SiluMul { gate: b.gate, up: b.up, out: b.act, rows, pass });
    add_linear(dev, b.act, rows, pass, w.down, s.x);
}

pub(crate) fn norm(
    dev: &mut dyn Device,
    x: Buf,
    weight: Buf,
    out: Act,
    rows: usize,
    pass: Pass,
    eps: f32,
) {
    dev.run(&RmsNorm { x, weight, out, rows, pass, eps });
}

/// `out = x · Wᵀ` for each pair.
pub(crate) fn linear<const N: usize>(
    dev: &mut dyn Device,
    x: Act,
    rows: usize,
    pass: Pass,
    parts: &[(Weight, Buf); N],
) {
    let parts = parts.map(|(weight, out)| LinearPart { weight, out, add: false });
    dev.run(&Linear::new(x, rows, pass, &parts));
}

/// `out += x · Wᵀ`.
pub(crate) fn add_linear(
    dev: &mut dyn Device,
    x: Act,
    rows: usize,
    pass: Pass,
    weight: Weight,
    out: Buf,
) {
    dev.run(&Linear::new(x, rows, pass, &[LinearPart { weight, out, add: true }]));
}

impl Target {
    /// Width of the residual stream.
    pub fn hidden(&self) -> usize {
        self.embed.k
    }

    /// Every matrix that one pass reads, in the order it reads them. The embedding is gathered, not
    /// read, so it only counts where it is also the head.
    pub fn pass_weights(&self) -> Vec<Weight> {
        let mut all = Vec::new();
        for layer in &self.layers {
            match &layer.mixer {
                Mixer::Attention(_, w) => all.extend([w.q, w.k, w.v, w.o]),
                Mixer::GatedDelta(_, w) => all.extend([w.qkv, w.z, w.b, w.a, w.out]),
            }
            all.extend([layer.mlp.gate, layer.mlp.up, layer.mlp.down]);
        }
        all.push(self.lm_head);
        all
    }

    /// Attention layers, and GatedDeltaNet layers.
    pub fn layer_counts(&self) -> (usize, usize) {
        let attention =
            self.layers.iter().filter(|l| matches!(l.mixer, Mixer::Attention(..))).count();
        (attention, self.layers.len() - attention)
    }
}
