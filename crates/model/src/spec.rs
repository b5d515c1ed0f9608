//! The geometry of a target model, taken from its checkpoint. Sizes are read or derived, never
//! defaulted; what the kernels can't run is refused here, with the name of the field.

mod config;
mod gguf;
#[cfg(test)]
mod tests;

use std::path::Path;

use ops::{GdnGeometry, RopePairing};

pub(crate) use config::{refuse_unsupported, rope_base};

use crate::LoadError;
use crate::files::{Checkpoint, Kind};
use crate::names::{Logical, Names};

/// Which family a checkpoint belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arch {
    /// Qwen3.5, 3.6 and 3.8, dense: `qwen3_5` in config.json, `qwen35` in GGUF.
    Qwen35,
    /// Plain attention without gates and per-head norms: `llama`.
    Llama,
}

impl Arch {
    /// The name in config.json.
    pub fn name(self) -> &'static str {
        match self {
            Arch::Qwen35 => "qwen3_5",
            Arch::Llama => "llama",
        }
    }
}

/// The mixer of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Full attention.
    Attention,
    /// Gated delta rule.
    GatedDelta,
}

/// Rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeSpec {
    /// Base of the frequencies.
    pub theta: f64,
    /// Elements of a head that turn: even, at most the head's size.
    pub dims: usize,
    /// Positions are divided by this: 1, or the factor of linear scaling.
    pub scaling: f64,
    /// Which elements turn together.
    pub pairing: RopePairing,
}

impl RopeSpec {
    /// Radians per position of each pair: `theta^(−2i / dims) / scaling`, rounded once to f32.
    pub fn inv_freq(&self) -> Vec<f32> {
        let pairs = 0..self.dims / 2;
        let power = |i: usize| self.theta.powf(-(2.0 * i as f64) / self.dims as f64);
        pairs.map(|i| (power(i) / self.scaling) as f32).collect()
    }
}

/// The attention layers of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Rotary embedding.
    pub rope: RopeSpec,
    /// Whether each head's query is followed by a gate in `q_proj`'s rows.
    pub gated: bool,
    /// Whether queries and keys are normalised per head.
    pub qk_norm: bool,
}

impl AttentionSpec {
    /// Rows of `q_proj`: the queries, and their gates.
    pub fn q_rows(&self) -> usize {
        self.num_heads * self.head_dim * if self.gated { 2 } else { 1 }
    }

    /// Rows of `k_proj` and of `v_proj`.
    pub fn kv_rows(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Width of all query heads: the inputs of `o_proj`.
    pub fn out_width(&self) -> usize {
        self.num_heads * self.head_dim
    }
}

/// The geometry of a target model. Names as in config.json.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// Family.
    pub arch: Arch,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Rows of the embedding table, and logits.
    pub vocab_size: usize,
    /// Ids that may be sampled are below this; the rest of the table is padding. `None` if the
    /// checkpoint comes without a tokenizer.
    pub real_vocab: Option<usize>,
    /// Width of the feed-forward layers.
    pub intermediate_size: usize,
    /// Added to the mean of squares in every norm.
    pub rms_norm_eps: f32,
    /// The mixer of each layer; as long as the model is deep.
    pub layer_types: Vec<LayerKind>,
    /// Attention layers.
    pub attention: AttentionSpec,
    /// GatedDeltaNet layers, if there are any. Their convolution has 4 taps.
    pub gdn: Option<GdnGeometry>,
    /// Whether the embedding table is also `lm_head`.
    pub tie_word_embeddings: bool,
    /// Positions that the model was made for.
    pub max_position_embeddings: usize,
    /// Whether norm weights are stored without their 1 (raw HF files), except the GDN norm's.
    pub norm_plus_one: bool,
}

/// Taps of the GatedDeltaNet convolution; no other number is supported.
pub const CONV_KERNEL: usize = ops::gdn_prepare::CONV_TAPS;

impl Spec {
    /// The geometry of an open checkpoint.
    ///
    /// # Errors
    /// If it is a draft or of another family, lacks a field, or needs what the kernels can't do.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Spec, LoadError> {
        let mut spec = match checkpoint.kind() {
            Kind::Safetensors => config::read(checkpoint)?,
            Kind::Gguf => gguf::read(checkpoint)?,
        };
        spec.check(&checkpoint.config_file())?;
        spec.real_vocab = checkpoint.tokenizer().id_count()?;
        if let Some(ids) = spec.real_vocab
            && ids > spec.vocab_size
        {
            let expected = format!("at most {}, the rows of the embedding", spec.vocab_size);
            return Err(LoadError::new(checkpoint.path(), "tokenizer ids", expected, ids));
        }
        Ok(spec)
    }

    /// The geometry as far as config.json alone tells it: not how norms are stored, nor whether the
    /// table is tied if the file doesn't say. `file` is for errors.
    ///
    /// # Errors
    /// As [`Spec::from_checkpoint`].
    pub fn from_config(file: &Path, config: &serde_json::Value) -> Result<Spec, LoadError> {
        let spec = config::parse(file, config)?;
        spec.check(file)?;
        Ok(spec)
    }

    /// How many layers there are.
    pub fn num_hidden_layers(&self) -> usize {
        self.layer_types.len()
    }

    /// How many layers of this kind there are.
    pub fn layers_of(&self, kind: LayerKind) -> usize {
        self.layer_types.iter().filter(|&&k| k == kind).count()
    }

    /// `[n, k]` of a weight matrix, `None` for vectors and for weights this model doesn't have.
    pub fn matrix_shape(&self, weight: Logical) -> Option<[usize; 2]> {
        let (h, i, a) = (self.hidden_size, self.intermediate_size, &self.attention);
        self.has(weight).then_some(())?;
        let delta = |f: fn(&GdnGeometry) -> usize| self.gdn.as_ref().map(f);
        Some(match weight {
            Logical::Embed | Logical::LmHead => [self.vocab_size, h],
            Logical::Q(_) => [a.q_rows(), h],
            Logical::K(_) | Logical::V(_) => [a.kv_rows(), h],
            Logical::O(_) => [h, a.out_width()],
            Logical::Gate(_) | Logical::Up(_) => [i, h],
            Logical::Down(_) => [h, i],
            Logical::GdnQkv(_) => [delta(GdnGeometry::channels)?, h],
            Logical::GdnZ(_) => [delta(GdnGeometry::values)?, h],
            Logical::GdnA(_) | Logical::GdnB(_) => [delta(|g| g.value_heads)?, h],
            Logical::GdnOut(_) => [h, delta(GdnGeometry::values)?],
            _ => return None,
        })
    }

    /// The number of elements of a vector, `None` for matrices and for weights this model doesn't have.
    pub fn vector_len(&self, weight: Logical) -> Option<usize> {
        self.has(weight).then_some(())?;
        let gdn = self.gdn.as_ref();
        match weight {
            Logical::FinalNorm | Logical::InputNorm(_) | Logical::PostNorm(_) => {
                Some(self.hidden_size)
            }
            Logical::QNorm(_) | Logical::KNorm(_) => Some(self.attention.head_dim),
            Logical::GdnConv(_) => Some(CONV_KERNEL * gdn?.channels()),
            Logical::GdnDecay(_) | Logical::GdnDtBias(_) => Some(gdn?.value_heads),
            Logical::GdnNorm(_) => Some(gdn?.value_dim),
            _ => None,
        }
    }

    /// Every weight of the model: matrices and vectors, in the order of the layers.
    pub fn weights(&self) -> Vec<Logical> {
        let all = Logical::of_target(self.num_hidden_layers());
        all.into_iter().filter(|&w| self.has(w)).collect()
    }

    /// Whether the model has this weight.
    fn has(&self, weight: Logical) -> bool {
        let Some(layer) = weight.layer() else {
            return match weight {
                Logical::Embed | Logical::FinalNorm => true,
                Logical::LmHead => !self.tie_word_embeddings,
                _ => false,
            };
        };
        let Some(&kind) = self.layer_types.get(layer) else { return false };
        match weight {
            Logical::InputNorm(_) | Logical::PostNorm(_) => true,
            Logical::Gate(_) | Logical::Up(_) | Logical::Down(_) => true,
            Logical::Q(_) | Logical::K(_) | Logical::V(_) | Logical::O(_) => {
                kind == LayerKind::Attention
            }
            Logical::QNorm(_) | Logical::KNorm(_) => {
                kind == LayerKind::Attention && self.attention.qk_norm
            }
            _ => kind == LayerKind::GatedDelta && weight.is_gdn(),
        }
    }

    /// Geometry that the kernels can't do, or that contradicts itself.
    fn check(&self, file: &Path) -> Result<(), LoadError> {
        check_widths(file, self.hidden_size, self.intermediate_size)?;
        check_eps(file, self.rms_norm_eps)?;
        self.attention.check(file)?;
        let Some(gdn) = &self.gdn else { return Ok(()) };
        check_multiple(file, "linear_key_head_dim", gdn.key_dim, 16)?;
        check_multiple(file, "linear_value_head_dim", gdn.value_dim, 16)?;
        check_multiple(file, "linear_num_value_heads", gdn.value_heads, gdn.key_heads)
    }
}

impl AttentionSpec {
    /// Geometry that the kernels can't do, or that contradicts itself.
    pub(crate) fn check(&self, file: &Path) -> Result<(), LoadError> {
        check_multiple(file, "head_dim", self.head_dim, 16)?;
        check_multiple(file, "num_attention_heads", self.num_heads, self.num_kv_heads)?;
        let dims = self.rope.dims;
        if dims.is_multiple_of(2) && (2..=self.head_dim).contains(&dims) {
            return Ok(());
        }
        let expected = format!("an even number from 2 to {}", self.head_dim);
        Err(LoadError::new(file, "rotary dims", expected, dims))
    }
}

/// Rows of activations are quantised in groups of 32.
pub(crate) fn check_widths(
    file: &Path,
    hidden_size: usize,
    intermediate_size: usize,
) -> Result<(), LoadError> {
    check_multiple(file, "hidden_size", hidden_size, ops::ACT_GROUP)?;
    check_multiple(file, "intermediate_size", intermediate_size, ops::ACT_GROUP)
}

pub(crate) fn check_eps(file: &Path, eps: f32) -> Result<(), LoadError> {
    match eps > 0.0 && eps < 1.0 {
        true => Ok(()),
        false => Err(LoadError::new(file, "rms_norm_eps", "a number between 0 and 1", eps)),
    }
}

fn check_multiple(file: &Path, field: &str, value: usize, of: usize) -> Result<(), LoadError> {
    match value.is_multiple_of(of) {
        true => Ok(()),
        false => Err(LoadError::new(file, field, format!("a multiple of {of}"), value)),
    }
}

/// What both formats settle by looking at the tensors: rows of the table, and whether it is tied.
fn check_table(
    checkpoint: &Checkpoint,
    names: &Names,
    hidden_size: usize,
    vocab_size: Option<usize>,
) -> Result<usize, LoadError> {
    let table = names.require(checkpoint, Logical::Embed)?;
    let rows = table.shape.first().copied().unwrap_or_default();
    let field = format!("tensor {}", table.name);
    if table.shape.len() != 2 || rows == 0 || rows as u64 > crate::fields::MAX_ROWS {
        let (expected, found) = (format!("[vocabulary, {hidden_size}]"), &table.shape);
        return Err(LoadError::new(table.file, field, expected, format!("{found:?}")));
    }
    match vocab_size {
        Some(n) if n != rows => {
            let expected = format!("{n} rows, as vocab_size says");
            Err(LoadError::new(table.file, field, expected, rows))
        }
        _ => Ok(rows),
    }
}
