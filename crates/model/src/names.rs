//! What a weight is called in a checkpoint.

use crate::LoadError;
use crate::files::{Checkpoint, Kind, Tensor};

/// A weight by what it does. The number is the layer, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Logical {
    /// Embedding table.
    Embed,
    /// Norm before `lm_head`; a draft's own in a draft.
    FinalNorm,
    /// Output table.
    LmHead,
    /// Norm before the mixer.
    InputNorm(usize),
    /// Norm before the feed-forward layer.
    PostNorm(usize),
    /// Queries; with gates, each head's gate follows its query.
    Q(usize),
    /// Keys.
    K(usize),
    /// Values.
    V(usize),
    /// Output of attention.
    O(usize),
    /// Norm of each query head.
    QNorm(usize),
    /// Norm of each key head.
    KNorm(usize),
    /// GatedDeltaNet: rows of q, then k, then v.
    GdnQkv(usize),
    /// GatedDeltaNet: the output gate.
    GdnZ(usize),
    /// GatedDeltaNet: before beta's sigmoid.
    GdnB(usize),
    /// GatedDeltaNet: before the decay's softplus.
    GdnA(usize),
    /// GatedDeltaNet: the convolution; read as `[4, channels]`.
    GdnConv(usize),
    /// GatedDeltaNet: read as −exp(A_log), `[value_heads]`.
    GdnDecay(usize),
    /// GatedDeltaNet: added to `GdnA`'s outputs.
    GdnDtBias(usize),
    /// GatedDeltaNet: norm of each value head; never stored without its 1.
    GdnNorm(usize),
    /// GatedDeltaNet: output.
    GdnOut(usize),
    /// Feed-forward: gate.
    Gate(usize),
    /// Feed-forward: up.
    Up(usize),
    /// Feed-forward: down.
    Down(usize),
    /// Draft: taps to hidden size.
    Fc,
    /// Draft: norm of `Fc`'s outputs.
    HiddenNorm,
    /// DFlash 2: the static kernels around attention, `[2, taps, hidden]`.
    AttnConvBase(usize),
    /// DFlash 2: the dynamic kernels around attention.
    AttnConvProj(usize),
    /// DFlash 2: the static kernels around the feed-forward layer, `[2, taps, hidden]`.
    MlpConvBase(usize),
    /// DFlash 2: the dynamic kernels around the feed-forward layer.
    MlpConvProj(usize),
    /// DFlash 2: selector table of predecessors, `[vocabulary, rank]`.
    SelectorPredecessor,
    /// DFlash 2: selector table of successors, `[vocabulary, rank]`.
    SelectorSuccessor,
    /// DFlash 2: hidden to rank.
    SelectorHidden,
}

impl Logical {
    /// The layer of a layer's weight.
    pub fn layer(self) -> Option<usize> {
        use Logical::*;
        match self {
            InputNorm(i) | PostNorm(i) | Q(i) | K(i) | V(i) | O(i) | QNorm(i) | KNorm(i) => Some(i),
            GdnQkv(i) | GdnZ(i) | GdnB(i) | GdnA(i) | GdnConv(i) | GdnDecay(i) => Some(i),
            GdnDtBias(i) | GdnNorm(i) | GdnOut(i) | Gate(i) | Up(i) | Down(i) => Some(i),
            AttnConvBase(i) | AttnConvProj(i) | MlpConvBase(i) | MlpConvProj(i) => Some(i),
            Embed | FinalNorm | LmHead | Fc | HiddenNorm => None,
            SelectorPredecessor | SelectorSuccessor | SelectorHidden => None,
        }
    }

    /// Whether only GatedDeltaNet layers have it.
    pub(crate) fn is_gdn(self) -> bool {
        use Logical::*;
        matches!(
            self,
            GdnQkv(_)
                | GdnZ(_)
                | GdnB(_)
                | GdnA(_)
                | GdnConv(_)
                | GdnDecay(_)
                | GdnDtBias(_)
                | GdnNorm(_)
                | GdnOut(_)
        )
    }

    /// Whether raw HF files of Qwen3.5 store it without its 1.
    pub(crate) fn is_zero_centred(self) -> bool {
        use Logical::*;
        matches!(self, FinalNorm | InputNorm(_) | PostNorm(_) | QNorm(_) | KNorm(_))
    }

    /// Everything that a target of this depth may have.
    pub(crate) fn of_target(layers: usize) -> Vec<Logical> {
        use Logical::*;
        let mut all = vec![Embed];
        for i in 0..layers {
            all.extend([InputNorm(i), Q(i), K(i), V(i), QNorm(i), KNorm(i), O(i)]);
            all.extend([GdnQkv(i), GdnZ(i), GdnB(i), GdnA(i), GdnConv(i), GdnDecay(i)]);
            all.extend([GdnDtBias(i), GdnNorm(i), GdnOut(i)]);
            all.extend([PostNorm(i), Gate(i), Up(i), Down(i)]);
        }
        all.extend([FinalNorm, LmHead]);
        all
    }

    /// Everything that a draft of this depth may have.
    pub(crate) fn of_draft(layers: usize) -> Vec<Logical> {
        use Logical::*;
        let mut all = vec![Fc, HiddenNorm];
        for i in 0..layers {
            all.extend([InputNorm(i), AttnConvBase(i), AttnConvProj(i)]);
            all.extend([Q(i), K(i), V(i), QNorm(i), KNorm(i), O(i)]);
            all.extend([PostNorm(i), MlpConvBase(i), MlpConvProj(i), Gate(i), Up(i), Down(i)]);
        }
        all.extend([FinalNorm, SelectorPredecessor, SelectorSuccessor, SelectorHidden]);
        all
    }
}

/// The naming of one checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    scheme: Scheme,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Scheme {
    /// HF and MLX differ in what stands before `layers.`.
    Hf {
        prefix: &'static str,
    },
    Gguf,
}

/// Before `embed_tokens`: multimodal HF, MLX, text-only HF, bare.
const TARGET_PREFIXES: [&str; 4] = ["model.language_model.", "language_model.model.", "model.", ""];
const DRAFT_PREFIXES: [&str; 2] = ["", "model."];

impl Names {
    /// The naming of a target.
    pub fn of_target(checkpoint: &Checkpoint) -> Names {
        Names::with(checkpoint, &TARGET_PREFIXES, "embed_tokens.weight")
    }

    /// The naming of a draft.
    pub fn of_draft(checkpoint: &Checkpoint) -> Names {
        Names::with(checkpoint, &DRAFT_PREFIXES, "fc.weight")
    }

    /// HF's naming under a prefix.
    #[cfg(test)]
    pub(crate) fn hf(prefix: &'static str) -> Names {
        Names { scheme: Scheme::Hf { prefix } }
    }

    /// GGUF's naming.
    #[cfg(test)]
    pub(crate) fn gguf() -> Names {
        Names { scheme: Scheme::Gguf }
    }

    /// The first prefix under which `probe` exists.
    fn with(checkpoint: &Checkpoint, prefixes: &[&'static str], probe: &str) -> Names {
        let scheme = match checkpoint.kind() {
            Kind::Gguf => Scheme::Gguf,
            Kind::Safetensors => {
                let holds = |p: &&&str| checkpoint.contains(&format!("{p}{probe}"));
                Scheme::Hf { prefix: prefixes.iter().find(holds).unwrap_or(&prefixes[0]) }
            }
        };
        Names { scheme }
    }

    /// The names that a weight may have here, the usual one first.
    pub fn candidates(&self, weight: Logical) -> Vec<String> {
        match self.scheme {
            Scheme::Hf { prefix } => hf_names(prefix, weight),
            Scheme::Gguf => gguf_names(weight),
        }
    }

    /// The tensor of a weight, if it is there.
    pub fn find<'a>(&self, checkpoint: &'a Checkpoint, weight: Logical) -> Option<Tensor<'a>> {
        self.candidates(weight).iter().find_map(|name| checkpoint.tensor(name))
    }

    /// The tensor of a weight.
    ///
    /// # Errors
    /// If it is missing.
    pub fn require<'a>(
        &self,
        checkpoint: &'a Checkpoint,
        weight: Logical,
    ) -> Result<Tensor<'a>, LoadError> {
        self.find(checkpoint, weight).ok_or_else(|| {
            let field = format!("tensor {}", self.candidates(weight)[0]);
            LoadError::new(checkpoint.path(), field, "this tensor", "none of this name")
        })
    }

    /// Whether a tensor that no weight uses changes nothing: other modalities, the built-in
    /// multi-token prediction, tables that can be computed.
    pub(crate) fn may_skip(&self, name: &str, layers: usize) -> bool {
        match self.scheme {
            Scheme::Hf { prefix } => {
                let ours = prefix.is_empty() || name.starts_with(prefix);
                let other = ["mtp.", "visual.", "vision_tower.", "model.visual.", "model.mtp."];
                !ours
                    || name.contains("mtp.")
                    || name.ends_with("rotary_emb.inv_freq")
                    || other.iter().any(|p| name.starts_with(p))
            }
            Scheme::Gguf => {
                // Blocks beyond the main layers are the multi-token prediction.
                let block = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next());
                block.and_then(|b| b.parse::<usize>().ok()).is_some_and(|b| b >= layers)
                    || name.contains("nextn")
            }
        }
    }
}

fn hf_names(prefix: &str, weight: Logical) -> Vec<String> {
    use Logical::*;
    let tail = match weight {
        Embed => "embed_tokens.weight",
        FinalNorm => "norm.weight",
        LmHead => {
            return vec![
                "lm_head.weight".to_owned(),
                "language_model.lm_head.weight".to_owned(),
                format!("{prefix}lm_head.weight"),
            ];
        }
        InputNorm(_) => "input_layernorm.weight",
        PostNorm(_) => "post_attention_layernorm.weight",
        Q(_) => "self_attn.q_proj.weight",
        K(_) => "self_attn.k_proj.weight",
        V(_) => "self_attn.v_proj.weight",
        O(_) => "self_attn.o_proj.weight",
        QNorm(_) => "self_attn.q_norm.weight",
        KNorm(_) => "self_attn.k_norm.weight",
        GdnQkv(_) => "linear_attn.in_proj_qkv.weight",
        GdnZ(_) => "linear_attn.in_proj_z.weight",
        GdnB(_) => "linear_attn.in_proj_b.weight",
        GdnA(_) => "linear_attn.in_proj_a.weight",
        GdnConv(_) => "linear_attn.conv1d.weight",
        GdnDecay(_) => "linear_attn.A_log",
        GdnDtBias(_) => "linear_attn.dt_bias",
        GdnNorm(_) => "linear_attn.norm.weight",
        GdnOut(_) => "linear_attn.out_proj.weight",
        Gate(_) => "mlp.gate_proj.weight",
        Up(_) => "mlp.up_proj.weight",
        Down(_) => "mlp.down_proj.weight",
        Fc => "fc.weight",
        HiddenNorm => "hidden_norm.weight",
        AttnConvBase(_) => "attention_conv.base_kernel",
        AttnConvProj(_) => "attention_conv.kernel_projection.weight",
        MlpConvBase(_) => "mlp_conv.base_kernel",
        MlpConvProj(_) => "mlp_conv.kernel_projection.weight",
        SelectorPredecessor => "candidate_selector.predecessor_codebook",
        SelectorSuccessor => "candidate_selector.successor_codebook",
        SelectorHidden => "candidate_selector.hidden_projection.weight",
    };
    let full = match weight.layer() {
        Some(i) => format!("{prefix}layers.{i}.{tail}"),
        None => format!("{prefix}{tail}"),
    };
    // A converter that makes a module of a bare table gives it a `.weight`.
    if tail.ends_with("_codebook") {
        let module = format!("{full}.weight");
        return vec![full, module];
    }
    vec![full]
}

fn gguf_names(weight: Logical) -> Vec<String> {
    use Logical::*;
    let tails: &[&str] = match weight {
        Embed => &["token_embd.weight"],
        FinalNorm => &["output_norm.weight"],
        LmHead => &["output.weight"],
        InputNorm(_) => &["attn_norm.weight"],
        PostNorm(_) => &["post_attention_norm.weight", "ffn_norm.weight"],
        Q(_) => &["attn_q.weight"],
        K(_) => &["attn_k.weight"],
        V(_) => &["attn_v.weight"],
        O(_) => &["attn_output.weight"],
        QNorm(_) => &["attn_q_norm.weight"],
        KNorm(_) => &["attn_k_norm.weight"],
        GdnQkv(_) => &["attn_qkv.weight"],
        GdnZ(_) => &["attn_gate.weight"],
        GdnB(_) => &["ssm_beta.weight"],
        GdnA(_) => &["ssm_alpha.weight"],
        GdnConv(_) => &["ssm_conv1d.weight"],
        GdnDecay(_) => &["ssm_a"],
        GdnDtBias(_) => &["ssm_dt.bias"],
        GdnNorm(_) => &["ssm_norm.weight"],
        GdnOut(_) => &["ssm_out.weight"],
        Gate(_) => &["ffn_gate.weight"],
        Up(_) => &["ffn_up.weight"],
        Down(_) => &["ffn_down.weight"],
        Fc => &["fc.weight"],
        HiddenNorm => &["enc.output_norm.weight"],
        AttnConvBase(_) => &["attn_conv_base.weight", "attn_conv_base"],
        AttnConvProj(_) => &["attn_conv_proj.weight", "attn_conv_proj"],
        MlpConvBase(_) => &["ffn_conv_base.weight", "ffn_conv_base"],
        MlpConvProj(_) => &["ffn_conv_proj.weight", "ffn_conv_proj"],
        SelectorPredecessor => &["selector_predecessor.weight", "selector_predecessor"],
        SelectorSuccessor => &["selector_successor.weight", "selector_successor"],
        SelectorHidden => &["selector_hidden.weight", "selector_hidden"],
    };
    let full = |tail: &&str| match weight.layer() {
        Some(i) => format!("blk.{i}.{tail}"),
        None => (*tail).to_owned(),
    };
    tails.iter().map(full).collect()
}
