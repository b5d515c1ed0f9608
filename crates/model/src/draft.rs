//! The DFlash draft: context rows from the target's taps, and blocks of proposals.
//!
//! Source: spec of the public DFlash and DFlash 2 reference code (z-lab, speculators). The draft has
//! no embedding and no head of its own; it borrows the target's.

use ops::{
    Act, ActDtype, Attention, AttnMix, AttnPrepare, BlockConv, BlockConvOut, Buf, Device,
    DeviceError, Embed, HeadGate, KvPool, Lanes, Linear, LinearPart, Pass, Queries, RmsNorm, Rope,
    SiluMul, Weight,
};

use crate::state::{PageShape, kv_pools};
use crate::target::{Mlp, Target, add_linear, linear, norm};

/// A draft with its weights on a device.
#[derive(Debug)]
pub struct Draft {
    /// Rows of a block: the anchor and its proposals.
    pub block: usize,
    /// Stands for a token to be proposed.
    pub mask_id: u32,
    /// Target layers whose output feeds `fc`.
    pub taps: Vec<usize>,
    /// `[hidden, taps · hidden]`.
    pub fc: Weight,
    /// `[hidden]` f32, after `fc`.
    pub hidden_norm: Buf,
    /// `[hidden]` f32, before the target's head.
    pub norm: Buf,
    /// In order.
    pub layers: Vec<DraftLayer>,
    /// DFlash 2's candidate selector.
    pub selector: Option<Selector>,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Width of the MLPs.
    pub intermediate: usize,
    /// Rotary embedding.
    pub rope: Rope,
    /// Of every norm.
    pub eps: f32,
}

impl Draft {
    /// Every matrix of the draft's own that a round reads, in order.
    pub fn pass_weights(&self) -> Vec<Weight> {
        let mut all = vec![self.fc];
        for layer in &self.layers {
            all.extend([layer.q, layer.k, layer.v, layer.o]);
            all.extend([layer.mlp.gate, layer.mlp.up, layer.mlp.down]);
            all.extend(layer.convs.iter().flatten().map(|conv| conv.projection));
        }
        all.extend(self.selector.as_ref().map(|s| s.projection));
        all
    }
}

/// One layer of a draft.
#[derive(Debug)]
pub struct DraftLayer {
    /// `[hidden]` f32.
    pub input_norm: Buf,
    /// `[hidden]` f32.
    pub post_norm: Buf,
    /// `[heads · head_dim, hidden]`.
    pub q: Weight,
    /// `[kv_heads · head_dim, hidden]`.
    pub k: Weight,
    /// `[kv_heads · head_dim, hidden]`.
    pub v: Weight,
    /// `[hidden, heads · head_dim]`.
    pub o: Weight,
    /// `[head_dim]` f32.
    pub q_norm: Buf,
    /// `[head_dim]` f32.
    pub k_norm: Buf,
    /// SwiGLU.
    pub mlp: Mlp,
    /// Context further back is not seen.
    pub window: Option<usize>,
    /// Whether a block row sees only rows before it.
    pub causal: bool,
    /// DFlash 2's convolutions around attention and around the MLP.
    pub convs: Option<[DynamicConv; 2]>,
}

/// DFlash 2's dynamic grouped convolution.
#[derive(Debug)]
pub struct DynamicConv {
    /// `[2 · taps · hidden / group, hidden]`.
    pub projection: Weight,
    /// `[2][taps, hidden]` f32: before and after.
    pub base: [Buf; 2],
    /// Taps.
    pub taps: usize,
    /// Channels that share a dynamic tap.
    pub group: usize,
}

/// DFlash 2's candidate path selector. Codebooks are `[vocab, rank]` bf16.
#[derive(Debug)]
pub struct Selector {
    /// Looked up by the token before.
    pub predecessor: Buf,
    /// Looked up by the candidate.
    pub successor: Buf,
    /// `[rank, hidden]`.
    pub projection: Weight,
    /// Rank.
    pub rank: usize,
    /// Candidates of a row.
    pub candidates: usize,
}

/// A draft's context and buffers. C = rows of the largest context pass, L = block rows of all lanes.
#[derive(Debug)]
pub struct DraftState {
    /// One pool for each layer; positions as in the target's.
    pub kv: Vec<KvPool>,
    /// `[L]` u32: the anchor and masks of each lane.
    pub ids: Buf,
    /// `[max(C, L), hidden]` f32.
    pub x: Buf,
    /// `[max(C, L), hidden]`.
    pub xn: Act,
    /// `[max(C, L), kv_heads · head_dim]` f32.
    pub k: Buf,
    /// `[max(C, L), kv_heads · head_dim]` f32.
    pub v: Buf,
    /// `[L, heads · head_dim]` f32.
    pub q: Buf,
    /// `[L, heads · head_dim]` f32.
    pub q_rotated: Buf,
    /// `[L, heads · head_dim]` f32.
    pub mixed: Buf,
    /// `[L, heads · head_dim]`.
    pub gated: Act,
    /// See [`Attention::scratch_bytes`].
    pub partials: Buf,
    /// `[L, intermediate]` f32.
    pub gate: Buf,
    /// `[L, intermediate]` f32.
    pub up: Buf,
    /// `[L, intermediate]`.
    pub act: Act,
    /// `[L, vocab]` f32.
    pub logits: Buf,
    /// `[L, rank]` f32: the selector's hidden rows.
    pub selector_rows: Buf,
    /// `[L, 2 · taps · hidden / group]` f32.
    pub dynamic: Buf,
    /// `[L, hidden]`: convolved input of a half layer.
    pub convolved: Act,
    /// `[L, hidden]` f32: output of a half layer before its convolution.
    pub half: Act,
}

impl DraftState {
    /// Allocates the draft's memory for lanes that share these pages.
    pub fn new(
        dev: &mut dyn Device,
        draft: &Draft,
        target: &Target,
        context_rows: usize,
        pages: &PageShape,
        table: Buf,
        dtype: ActDtype,
    ) -> Result<DraftState, DeviceError> {
        let hidden = target.embed.k;
        let rows = pages.slots * draft.block;
        let all = rows.max(context_rows);
        let (q, kv) = (draft.heads * draft.head_dim, draft.kv_heads * draft.head_dim);
        let heads = (draft.kv_heads, draft.head_dim);
        let conv = draft.layers.iter().find_map(|l| l.convs.as_ref()).map(|c| &c[0]);
        let dynamic = conv.map_or(0, |c| c.projection.n);
        let rank = draft.selector.as_ref().map_or(0, |s| s.rank);
        let shape = (draft.heads, draft.kv_heads);
        let partials = Attention::scratch_bytes(rows, shape, draft.head_dim);
        let kv_pools = kv_pools(dev, draft.layers.len(), table, heads, pages)?;
        let mut f32 = |rows: usize, width: usize, what: &str| dev.alloc(4 * rows * width, what);
        let x = f32(all, hidden, "draft residual stream")?;
        let k = f32(all, kv, "draft keys")?;
        let v = f32(all, kv, "draft values")?;
        let q_rows = f32(rows, q, "draft queries")?;
        let q_rotated = f32(rows, q, "draft queries")?;
        let mixed = f32(rows, q, "draft attention")?;
        let gate = f32(rows, draft.intermediate, "draft MLP")?;
        let up = f32(rows, draft.intermediate, "draft MLP")?;
        let logits = f32(rows, target.lm_head.n, "draft logits")?;
        let selector_rows = f32(rows, rank, "selector rows")?;
        let dynamic = f32(rows, dynamic, "dynamic taps")?;
        let mut act = |rows: usize, width: usize, dtype| -> Result<Act, DeviceError> {
            let buf = dev.alloc(rows * Act::stride(width, dtype), "draft activations")?;
            Ok(Act { buf, width, dtype })
        };
        let state = DraftState {
            kv: kv_pools,
            xn: act(all, hidden, dtype)?,
            gated: act(rows, q, dtype)?,
            act: act(rows, draft.intermediate, dtype)?,
            convolved: act(rows, hidden, dtype)?,
            half: act(rows, hidden, ActDtype::F32)?,
            ids: dev.alloc(4 * rows, "draft ids")?,
            partials: dev.alloc(partials, "draft attention splits")?,
            x,
            k,
            v,
            q: q_rows,
            q_rotated,
            mixed,
            gate,
            up,
            logits,
            selector_rows,
            dynamic,
        };
        dev.write(state.ids, bytemuck::cast_slice(&vec![draft.mask_id; rows]));
        Ok(state)
    }
}

/// Adds the pass's rows to the draft's context, from the target's taps. Rows that a verify pass
/// does not keep are overwritten by the next block at their positions.
pub fn context(
    dev: &mut dyn Device,
    d: &Draft,
    s: &DraftState,
    features: Act,
    lanes: Lanes,
    pass: Pass,
) {
    let rows = lanes.rows;
    linear(dev, features, rows, pass, &[(d.fc, s.x)]);
    norm(dev, s.x, d.hidden_norm, s.xn, rows, pass, d.eps);
    for (layer, &kv) in d.layers.iter().zip(&s.kv) {
        linear(dev, s.xn, rows, pass, &[(layer.k, s.k), (layer.v, s.v)]);
        dev.run(&AttnPrepare {
            queries: None,
            k: s.k,
            v: s.v,
            k_norm: Some(layer.k_norm),
            rope: d.rope,
            kv,
            lanes,
            eps: d.eps,
        });
    }
}

/// Blocks are proposed in rounds.
const PASS: Pass = Pass::Round;

/// Runs a block through the draft: `[anchor, mask, …]` of each lane from `s.ids`, at the lane's
/// position. Row i of a lane is left predicting the token at its own position: logits in
/// `s.logits`, and with a selector its hidden rows in `s.selector_rows`. Row 0 predicts nothing.
pub fn block(dev: &mut dyn Device, d: &Draft, target: &Target, s: &DraftState, lanes: Lanes) {
    let rows = lanes.rows;
    dev.run(&Embed { ids: s.ids, table: target.embed, out: s.x, rows });
    for (layer, &kv) in d.layers.iter().zip(&s.kv) {
        norm(dev, s.x, layer.input_norm, s.xn, rows, PASS, d.eps);
        let convs = layer.convs.as_ref();
        let x = conv_before(dev, convs.map(|c| &c[0]), s, lanes);
        attention(dev, d, layer, s, kv, x, lanes);
        after(dev, convs.map(|c| &c[0]), s, s.gated, layer.o, lanes);
        norm(dev, s.x, layer.post_norm, s.xn, rows, PASS, d.eps);
        let x = conv_before(dev, convs.map(|c| &c[1]), s, lanes);
        linear(dev, x, rows, PASS, &[(layer.mlp.gate, s.gate), (layer.mlp.up, s.up)]);
        dev.run(&SiluMul { gate: s.gate, up: s.up, out: s.act, rows, pass: PASS });
        after(dev, convs.map(|c| &c[1]), s, s.act, layer.mlp.down, lanes);
    }
    head(dev, d, target, s, lanes);
}

fn attention(
    dev: &mut dyn Device,
    d: &Draft,
    layer: &DraftLayer,
    s: &DraftState,
    kv: KvPool,
    x: Act,
    lanes: Lanes,
) {
    let (rows, heads, dim) = (lanes.rows, d.heads, d.head_dim);
    linear(dev, x, rows, PASS, &[(layer.q, s.q), (layer.k, s.k), (layer.v, s.v)]);
    let norm = Some(layer.q_norm);
    let prepare = AttnPrepare {
        queries: Some(Queries { q: s.q, stride: dim, norm, heads, out: s.q_rotated }),
        k: s.k,
        v: s.v,
        k_norm: Some(layer.k_norm),
        rope: d.rope,
        kv,
        lanes,
        eps: d.eps,
    };
    let attention = Attention {
        q: s.q_rotated,
        kv,
        out: s.mixed,
        scratch: s.partials,
        lanes,
        heads,
        scale: (dim as f32).powf(-0.5),
        causal: layer.causal,
        window: layer.window,
        pass: PASS,
    };
    let gate = HeadGate { x: s.mixed, q_gate: None, out: s.gated, rows, heads, dim };
    dev.run(&AttnMix { prepare, attention, gate });
}

/// The input of a half layer: `s.xn`, convolved in DFlash 2, whose taps are also left for [`after`].
fn conv_before(
    dev: &mut dyn Device,
    conv: Option<&DynamicConv>,
    s: &DraftState,
    lanes: Lanes,
) -> Act {
    let Some(conv) = conv else { return s.xn };
    linear(dev, s.xn, lanes.rows, PASS, &[(conv.projection, s.dynamic)]);
    run_conv(dev, conv, 0, s.xn, BlockConvOut::Act(s.convolved), s, lanes);
    s.convolved
}

/// The output of a half layer: projected, convolved in DFlash 2, and added to the residual stream.
fn after(
    dev: &mut dyn Device,
    conv: Option<&DynamicConv>,
    s: &DraftState,
    x: Act,
    weight: Weight,
    lanes: Lanes,
) {
    let Some(conv) = conv else { return add_linear(dev, x, lanes.rows, PASS, weight, s.x) };
    linear(dev, x, lanes.rows, PASS, &[(weight, s.half.buf)]);
    run_conv(dev, conv, 1, s.half, BlockConvOut::Add(s.x), s, lanes);
}

fn run_conv(
    dev: &mut dyn Device,
    conv: &DynamicConv,
    side: usize,
    x: Act,
    out: BlockConvOut,
    s: &DraftState,
    lanes: Lanes,
) {
    let (base, width) = (conv.base[side], x.width);
    let (taps, group) = (conv.taps, conv.group);
    dev.run(&BlockConv { x, dynamic: s.dynamic, side, base, out, lanes, taps, width, group });
}

fn head(dev: &mut dyn Device, d: &Draft, target: &Target, s: &DraftState, lanes: Lanes) {
    let rows = lanes.rows;
    dev.run(&RmsNorm { x: s.x, weight: d.norm, out: s.xn, rows, pass: PASS, eps: d.eps });
    if let Some(selector) = &d.selector {
        linear(dev, s.xn, rows, PASS, &[(selector.projection, s.selector_rows)]);
    }
    // A lone lane's first row predicts nothing, so its logits need not be computed.
    let first = usize::from(lanes.count == 1);
    let x = Act { buf: s.xn.buf.rows(first, rows - first, s.xn.row_bytes()), ..s.xn };
    let vocab = target.lm_head.n;
    let out = s.logits.rows(first, rows - first, 4 * vocab);
    dev.run(&Linear::new(
        x,
        rows - first,
        PASS,
        &[LinearPart { weight: target.lm_head, out, add: false }],
    ));
}
