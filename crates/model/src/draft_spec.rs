//! The geometry of a DFlash draft, version 1 or 2, taken from its checkpoint, and whether it fits
//! a target.

mod config;
mod gguf;
#[cfg(test)]
mod tests;

use std::path::Path;

use crate::LoadError;
use crate::files::{Checkpoint, Kind};
use crate::names::{Logical, Names};
use crate::spec::{AttentionSpec, Spec};

/// How one layer of a draft attends. Context is always visible within the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftLayer {
    /// A context row at position p is visible to a block row at position q if q − p is less than
    /// this; `None`: always.
    pub window: Option<usize>,
    /// Whether block rows see only the block rows before them and themselves.
    pub causal: bool,
}

/// What DFlash 2 adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dflash2 {
    /// Taps of the block convolutions.
    pub conv_kernel_size: usize,
    /// Channels that share a dynamic kernel.
    pub conv_group_size: usize,
    /// Width of the selector's tables.
    pub selector_rank: usize,
    /// Candidates of the selector.
    pub selector_top_k: usize,
}

/// The geometry of a draft. It has neither embedding nor `lm_head`: the target's are used.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftSpec {
    /// Width of the residual stream, and of the target's.
    pub hidden_size: usize,
    /// Width of the feed-forward layers.
    pub intermediate_size: usize,
    /// Added to the mean of squares in every norm. No norm is stored without its 1.
    pub rms_norm_eps: f32,
    /// Attention: no gates, per-head norms, rotary embedding of whole heads.
    pub attention: AttentionSpec,
    /// The layers.
    pub layers: Vec<DraftLayer>,
    /// Target layers whose outputs feed the draft, in the order of `fc`'s inputs.
    pub target_layer_ids: Vec<usize>,
    /// Whether `target_layer_ids` may count from 1, as some GGUF converters do. Settled by
    /// [`DraftSpec::fitted_to`].
    pub(crate) ids_uncertain: bool,
    /// The id that fills a block behind its anchor.
    pub mask_token_id: u32,
    /// Rows of a block: the anchor and the proposals.
    pub block_size: usize,
    /// The target's depth, if the file says.
    pub num_target_layers: Option<usize>,
    /// Rows of the target's tables, if the file says.
    pub vocab_size: Option<usize>,
    /// DFlash 2's parts.
    pub dflash2: Option<Dflash2>,
}

/// Bound of a block, far above what pays.
const MAX_BLOCK: u64 = 64;
/// Bound of the candidates, that of the ops.
const MAX_TOP_K: u64 = 32;
/// Bound of the number of taps and of the taps of a convolution.
const MAX_TAPS: u64 = 64;

impl DraftSpec {
    /// The geometry of an open checkpoint. Whether the tensors of DFlash 2 are there decides the
    /// version, not the name of the architecture.
    ///
    /// # Errors
    /// If it isn't a draft, lacks a field, or needs what the kernels can't do.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<DraftSpec, LoadError> {
        let found = Found::of(checkpoint);
        let spec = match checkpoint.kind() {
            Kind::Safetensors => {
                config::parse(&checkpoint.config_file(), checkpoint.config(), &found)?
            }
            Kind::Gguf => gguf::read(checkpoint, &found)?,
        };
        spec.check(&checkpoint.config_file())?;
        Ok(spec)
    }

    /// The geometry of a version 1 draft as far as config.json alone tells it. `file` is for errors.
    ///
    /// # Errors
    /// As [`DraftSpec::from_checkpoint`].
    pub fn from_config(file: &Path, config: &serde_json::Value) -> Result<DraftSpec, LoadError> {
        let spec = config::parse(file, config, &Found::default())?;
        spec.check(file)?;
        Ok(spec)
    }

    /// How many layers there are.
    pub fn num_hidden_layers(&self) -> usize {
        self.layers.len()
    }

    /// Inputs of `fc`.
    pub fn fc_inputs(&self) -> usize {
        self.target_layer_ids.len() * self.hidden_size
    }

    /// `[n, k]` of a weight matrix, `None` for vectors and for weights this draft doesn't have.
    pub fn matrix_shape(&self, weight: Logical) -> Option<[usize; 2]> {
        let (h, i, a) = (self.hidden_size, self.intermediate_size, &self.attention);
        self.has(weight).then_some(())?;
        Some(match weight {
            Logical::Fc => [h, self.fc_inputs()],
            Logical::Q(_) => [a.q_rows(), h],
            Logical::K(_) | Logical::V(_) => [a.kv_rows(), h],
            Logical::O(_) => [h, a.out_width()],
            Logical::Gate(_) | Logical::Up(_) => [i, h],
            Logical::Down(_) => [h, i],
            Logical::AttnConvProj(_) | Logical::MlpConvProj(_) => {
                let two = self.dflash2?;
                [2 * two.conv_kernel_size * (h / two.conv_group_size), h]
            }
            Logical::SelectorPredecessor | Logical::SelectorSuccessor => {
                [self.vocab_size?, self.dflash2?.selector_rank]
            }
            Logical::SelectorHidden => [self.dflash2?.selector_rank, h],
            _ => return None,
        })
    }

    /// The number of elements of a vector, `None` for matrices and for weights this draft doesn't have.
    pub fn vector_len(&self, weight: Logical) -> Option<usize> {
        self.has(weight).then_some(())?;
        match weight {
            Logical::HiddenNorm | Logical::FinalNorm => Some(self.hidden_size),
            Logical::InputNorm(_) | Logical::PostNorm(_) => Some(self.hidden_size),
            Logical::QNorm(_) | Logical::KNorm(_) => Some(self.attention.head_dim),
            Logical::AttnConvBase(_) | Logical::MlpConvBase(_) => {
                Some(2 * self.dflash2?.conv_kernel_size * self.hidden_size)
            }
            _ => None,
        }
    }

    /// Every weight of the draft: matrices and vectors, in the order of the layers.
    pub fn weights(&self) -> Vec<Logical> {
        let all = Logical::of_draft(self.num_hidden_layers());
        all.into_iter().filter(|&w| self.has(w)).collect()
    }

    fn has(&self, weight: Logical) -> bool {
        use Logical::*;
        if weight.layer().is_some_and(|i| i >= self.layers.len()) {
            return false;
        }
        match weight {
            Fc | HiddenNorm | FinalNorm | InputNorm(_) | PostNorm(_) => true,
            Q(_) | K(_) | V(_) | O(_) | QNorm(_) | KNorm(_) => true,
            Gate(_) | Up(_) | Down(_) => true,
            AttnConvBase(_) | AttnConvProj(_) | MlpConvBase(_) | MlpConvProj(_) => {
                self.dflash2.is_some()
            }
            SelectorPredecessor | SelectorSuccessor | SelectorHidden => self.dflash2.is_some(),
            _ => false,
        }
    }

    /// The draft with everything settled that only the target can settle.
    ///
    /// # Errors
    /// If it was made for another target: the reason. A draft that doesn't fit would run, and be
    /// useless without a word.
    pub fn fitted_to(mut self, target: &Spec, file: &Path) -> Result<DraftSpec, LoadError> {
        // llama.cpp's converter counts from 1 (it takes a layer's input), others write HF's ids.
        // HF's rule puts the last tap at n − 3.
        let raw_last = target.num_hidden_layers().checked_sub(3);
        if self.ids_uncertain && self.target_layer_ids.iter().max().copied() != raw_last {
            for id in &mut self.target_layer_ids {
                *id = id.checked_sub(1).ok_or_else(|| {
                    LoadError::new(file, "target_layers", "layers counted from 1", 0)
                })?;
            }
        }
        self.ids_uncertain = false;
        self.check_against(target, file)?;
        self.vocab_size = Some(target.vocab_size);
        Ok(self)
    }

    /// Whether the draft was made for a target like this one. `file` is the draft's, for the error.
    ///
    /// # Errors
    /// If not: the reason.
    pub fn check_against(&self, target: &Spec, file: &Path) -> Result<(), LoadError> {
        let same = |field: &str, draft: usize, target: usize| match draft == target {
            true => Ok(()),
            false => {
                let expected = format!("{target}, the target's; use a draft made for this model");
                Err(LoadError::new(file, field, expected, draft))
            }
        };
        same("hidden_size", self.hidden_size, target.hidden_size)?;
        let layers = target.num_hidden_layers();
        if let Some(n) = self.num_target_layers {
            same("num_target_layers", n, layers)?;
        }
        if let Some(n) = self.vocab_size {
            same("vocab_size", n, target.vocab_size)?;
        }
        if let Some(&id) = self.target_layer_ids.iter().find(|&&id| id >= layers) {
            let expected = format!("layers below {layers}; use a draft made for this model");
            return Err(LoadError::new(file, "target_layer_ids", expected, id));
        }
        if self.mask_token_id as usize >= target.vocab_size {
            let expected = format!("an id below the {} rows of the embedding", target.vocab_size);
            return Err(LoadError::new(file, "mask_token_id", expected, self.mask_token_id));
        }
        Ok(())
    }

    /// Geometry that the kernels can't do, or that contradicts itself.
    fn check(&self, file: &Path) -> Result<(), LoadError> {
        crate::spec::check_widths(file, self.hidden_size, self.intermediate_size)?;
        crate::spec::check_eps(file, self.rms_norm_eps)?;
        self.attention.check(file)?;
        if let Some(two) = self.dflash2
            && !self.hidden_size.is_multiple_of(two.conv_group_size)
        {
            let expected = format!("a divisor of the hidden size {}", self.hidden_size);
            return Err(LoadError::new(file, "conv_group_size", expected, two.conv_group_size));
        }
        Ok(())
    }
}

/// What the tensors of a draft say about its geometry.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Found {
    /// Inputs of `fc`.
    fc_inputs: Option<usize>,
    /// Whether there are tensors of DFlash 2.
    dflash2: bool,
    /// Taps of the block convolutions.
    conv_kernel_size: Option<usize>,
    /// Rows of the selector's projection.
    selector_rank: Option<usize>,
    /// Rows of the selector's tables.
    vocab_size: Option<usize>,
}

impl Found {
    fn of(checkpoint: &Checkpoint) -> Found {
        let names = Names::of_draft(checkpoint);
        let shape = |weight| names.find(checkpoint, weight).map(|t| t.shape);
        // In MLX files the inputs are packed, so `fc` counts only where it is dense.
        let fc = names.find(checkpoint, Logical::Fc);
        let fc = fc.filter(|t| !matches!(t.storage, crate::files::Storage::U32(_)));
        let base = shape(Logical::AttnConvBase(0));
        let hidden = shape(Logical::SelectorHidden);
        let table = shape(Logical::SelectorPredecessor);
        Found {
            fc_inputs: fc.and_then(|t| t.shape.get(1).copied()),
            dflash2: base.is_some() || hidden.is_some() || table.is_some(),
            conv_kernel_size: base.and_then(|s| s.get(1).copied()),
            selector_rank: hidden.and_then(|s| s.first().copied()),
            vocab_size: table.and_then(|s| s.first().copied()),
        }
    }
}

/// The taps of a draft that doesn't name them: `count` layers spread over the target's depth.
///
/// # Errors
/// If the target is too shallow for the rule.
fn default_taps(file: &Path, count: usize, layers: usize) -> Result<Vec<usize>, LoadError> {
    if count == 1 {
        return Ok(vec![layers / 2]);
    }
    let Some(span) = layers.checked_sub(4).filter(|_| count > 0) else {
        let expected = "this list, for a target of less than 4 layers";
        return Err(LoadError::new(file, "target_layer_ids", expected, "none"));
    };
    let tap = |i: usize| 1.0 + (i * span) as f64 / (count - 1) as f64;
    Ok((0..count).map(|i| tap(i).round_ties_even() as usize).collect())
}
