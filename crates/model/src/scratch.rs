//! The wave of activations: every intermediate buffer of a pass, allocated once.

use ops::{Act, ActDtype, Attention, Buf, Device, DeviceError, GatedDelta, GdnGeometry};

use crate::target::Target;

/// Sizes that decide the buffers. Of a target and, where larger, of its draft.
#[derive(Clone, Debug)]
pub struct ScratchShape {
    /// Rows of the largest pass.
    pub rows: usize,
    /// Rows whose logits are kept.
    pub logit_rows: usize,
    /// Residual stream.
    pub hidden: usize,
    /// MLP.
    pub intermediate: usize,
    /// Rows of the vocabulary projection.
    pub vocab: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Elements of a head's query projection: `head_dim`, twice that with a gate.
    pub q_stride: usize,
    /// GatedDeltaNet layers' heads.
    pub gdn: Option<GdnGeometry>,
    /// Target layers whose output is kept for the draft.
    pub taps: Vec<usize>,
    /// Storage of activations.
    pub act: ActDtype,
}

impl ScratchShape {
    /// For passes of up to `rows` rows of a target, of which `logit_rows` may have logits.
    pub fn of(
        target: &Target,
        (rows, logit_rows): (usize, usize),
        taps: Vec<usize>,
        act: ActDtype,
    ) -> ScratchShape {
        let a = &target.attention;
        ScratchShape {
            rows,
            logit_rows,
            hidden: target.hidden(),
            intermediate: target.intermediate,
            vocab: target.lm_head.n,
            heads: a.heads,
            kv_heads: a.kv_heads,
            head_dim: a.head_dim,
            q_stride: a.q_stride(),
            gdn: target.gdn,
            taps,
            act,
        }
    }
}

/// Buffers of a pass. R = rows of the pass, H = hidden size.
#[derive(Debug)]
pub struct Scratch {
    /// `[R]` u32.
    pub ids: Buf,
    /// `[R, H]` f32: the residual stream.
    pub x: Buf,
    /// `[R, H]`: normed.
    pub xn: Act,
    /// `[logit rows, vocab]` f32.
    pub logits: Buf,
    /// `[R, taps · H]`: the residual stream after each tapped layer.
    pub features: Act,
    /// Tapped layers, in the order of their columns in `features`.
    pub taps: Vec<usize>,
    /// H.
    pub hidden: usize,
    /// Buffers of attention layers.
    pub attention: AttentionScratch,
    /// Buffers of GatedDeltaNet layers; they share memory with the other two groups.
    pub gdn: GdnScratch,
    /// Buffers of MLPs.
    pub mlp: MlpScratch,
}

/// f32 unless said otherwise.
#[derive(Debug)]
pub struct AttentionScratch {
    /// `[R, heads · stride]`.
    pub q_gate: Buf,
    /// `[R, kv_heads · head_dim]`.
    pub k: Buf,
    /// `[R, kv_heads · head_dim]`.
    pub v: Buf,
    /// `[R, heads · head_dim]`.
    pub q: Buf,
    /// `[R, heads · head_dim]`.
    pub mixed: Buf,
    /// `[R, heads · head_dim]` activations.
    pub gated: Act,
    /// See [`Attention::scratch_bytes`].
    pub partials: Buf,
}

/// f32 unless said otherwise.
#[derive(Debug)]
pub struct GdnScratch {
    /// `[R, channels]`.
    pub qkv: Buf,
    /// See [`GatedDelta::scratch_bytes`]. Shares memory with `qkv`, which nothing reads by then.
    pub chunks: Buf,
    /// `[R, values]`.
    pub z: Buf,
    /// `[R, value_heads]`.
    pub b: Buf,
    /// `[R, value_heads]`.
    pub a: Buf,
    /// `[R, keys]`.
    pub q: Buf,
    /// `[R, keys]`.
    pub k: Buf,
    /// `[R, values]`.
    pub v: Buf,
    /// `[R, value_heads]`.
    pub g: Buf,
    /// `[R, value_heads]`.
    pub beta: Buf,
    /// `[R, values]`.
    pub mixed: Buf,
    /// `[R, values]` activations.
    pub gated: Act,
}

/// f32 unless said otherwise.
#[derive(Debug)]
pub struct MlpScratch {
    /// `[R, intermediate]`.
    pub gate: Buf,
    /// `[R, intermediate]`.
    pub up: Buf,
    /// `[R, intermediate]` activations.
    pub act: Act,
}

/// The most lanes of one prefill pass.
const PREFILL_LANES: usize = 8;

/// Hands out consecutive parts of a buffer; without one, only measures.
struct Cut {
    from: Option<Buf>,
    used: usize,
}

impl Cut {
    fn take(&mut self, bytes: usize) -> Buf {
        let offset = self.used;
        self.used += bytes.next_multiple_of(64);
        match self.from {
            Some(buf) => buf.slice(offset, bytes),
            None => Buf { alloc: 0, offset, bytes },
        }
    }

    fn f32(&mut self, rows: usize, width: usize) -> Buf {
        self.take(4 * rows * width)
    }

    fn act(&mut self, rows: usize, width: usize, dtype: ActDtype) -> Act {
        Act { buf: self.take(rows * Act::stride(width, dtype)), width, dtype }
    }
}

fn attention(c: &mut Cut, s: &ScratchShape) -> AttentionScratch {
    let (r, q, kv) = (s.rows, s.heads * s.head_dim, s.kv_heads * s.head_dim);
    AttentionScratch {
        q_gate: c.f32(r, s.heads * s.q_stride),
        k: c.f32(r, kv),
        v: c.f32(r, kv),
        q: c.f32(r, q),
        mixed: c.f32(r, q),
        gated: c.act(r, q, s.act),
        partials: c.take(Attention::scratch_bytes(s.logit_rows, (s.heads, s.kv_heads), s.head_dim)),
    }
}

fn gdn(c: &mut Cut, s: &ScratchShape) -> GdnScratch {
    let r = s.rows;
    let of = |f: fn(&GdnGeometry) -> usize| s.gdn.as_ref().map_or(0, f);
    let (keys, values) = (of(GdnGeometry::keys), of(GdnGeometry::values));
    let (channels, heads) = (of(GdnGeometry::channels), of(|g| g.value_heads));
    let qkv = 4 * r * channels;
    let chunks = s.gdn.as_ref().map_or(0, |g| GatedDelta::scratch_bytes(r, PREFILL_LANES, g));
    let first = c.take(qkv.max(chunks));
    GdnScratch {
        qkv: first.slice(0, qkv),
        chunks: first.slice(0, chunks),
        z: c.f32(r, values),
        b: c.f32(r, heads),
        a: c.f32(r, heads),
        q: c.f32(r, keys),
        k: c.f32(r, keys),
        v: c.f32(r, values),
        g: c.f32(r, heads),
        beta: c.f32(r, heads),
        mixed: c.f32(r, values),
        gated: c.act(r, values, s.act),
    }
}

fn mlp(c: &mut Cut, s: &ScratchShape) -> MlpScratch {
    MlpScratch {
        gate: c.f32(s.rows, s.intermediate),
        up: c.f32(s.rows, s.intermediate),
        act: c.act(s.rows, s.intermediate, s.act),
    }
}

impl Scratch {
    /// Allocates everything.
    pub fn new(dev: &mut dyn Device, s: &ScratchShape) -> Result<Scratch, DeviceError> {
        // One layer's mixer and MLP run one after the other, so their buffers share memory.
        let mut sizes = [0; 3].map(|used| Cut { from: None, used });
        attention(&mut sizes[0], s);
        gdn(&mut sizes[1], s);
        mlp(&mut sizes[2], s);
        let bytes = sizes.map(|cut| cut.used).into_iter().fold(0, usize::max);
        let shared = dev.alloc(bytes, "activations of one layer")?;
        let cut = || Cut { from: Some(shared), used: 0 };
        let act = |dev: &mut dyn Device, width: usize, what: &str| -> Result<Act, DeviceError> {
            let buf = dev.alloc(s.rows * Act::stride(width, s.act), what)?;
            Ok(Act { buf, width, dtype: s.act })
        };
        Ok(Scratch {
            ids: dev.alloc(4 * s.rows, "token ids")?,
            x: dev.alloc(4 * s.rows * s.hidden, "residual stream")?,
            xn: act(dev, s.hidden, "normed residual stream")?,
            logits: dev.alloc(4 * s.logit_rows * s.vocab, "logits")?,
            features: act(dev, s.hidden * s.taps.len(), "tapped features")?,
            taps: s.taps.clone(),
            hidden: s.hidden,
            attention: attention(&mut cut(), s),
            gdn: gdn(&mut cut(), s),
            mlp: mlp(&mut cut(), s),
        })
    }
}
