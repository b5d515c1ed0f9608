//! From an open checkpoint to weights on a device.

use std::sync::Mutex;

use ops::linear::{self, TILE};
use ops::{Buf, Device, DeviceError, Rope, RopePairing, ScaleDtype, Weight};

use crate::draft::{Draft, DraftLayer, DynamicConv, Selector};
use crate::origin::{DraftSource, TargetSource};
use crate::source::{FloatDtype, Matrix, Source};
use crate::spec::{AttentionSpec, LayerKind};
use crate::target::{AttentionShape, AttentionWeights, GdnWeights, Layer, Mixer, Mlp, Target};
use crate::{LoadError, Logical};

/// Why loading failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The checkpoint.
    #[error(transparent)]
    File(#[from] LoadError),
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Told, after each matrix, how many bytes of the checkpoint are done.
pub type Progress<'a> = &'a mut dyn FnMut(u64);

/// What both kinds of sources offer to the uploader.
trait Weights {
    fn matrix(&self, weight: Logical) -> Result<Matrix<'_>, LoadError>;
    fn vector(&self, weight: Logical) -> Result<Vec<f32>, LoadError>;
    fn error(&self, weight: Logical, expected: String, found: String) -> LoadError;
    fn release(&self);
}

macro_rules! weights {
    ($source:ty) => {
        impl Weights for $source {
            fn matrix(&self, weight: Logical) -> Result<Matrix<'_>, LoadError> {
                self.matrix(weight)
            }
            fn vector(&self, weight: Logical) -> Result<Vec<f32>, LoadError> {
                self.vector(weight)
            }
            fn error(&self, weight: Logical, expected: String, found: String) -> LoadError {
                LoadError::new(self.path(), format!("{weight:?}"), expected, found)
            }
            fn release(&self) {
                self.release();
            }
        }
    };
}
weights!(TargetSource);
weights!(DraftSource);

struct Uploader<'a> {
    dev: &'a mut dyn Device,
    source: &'a dyn Weights,
    done: u64,
    progress: Progress<'a>,
}

impl Target {
    /// Repacks all weights into device memory, straight from the mapped files.
    pub fn load(
        dev: &mut dyn Device,
        source: &TargetSource,
        progress: Progress<'_>,
    ) -> Result<Target, Failure> {
        source.advise_sequential();
        let spec = source.spec();
        let mut up = Uploader { dev, source, done: 0, progress };
        let embed = up.matrix(Logical::Embed)?;
        let (mut attention, mut gdn) = (0, 0);
        let mut layers = Vec::with_capacity(spec.num_hidden_layers());
        for (i, kind) in spec.layer_types.iter().enumerate() {
            let mixer = match kind {
                LayerKind::Attention => {
                    attention += 1;
                    Mixer::Attention(attention - 1, up.attention(i, spec.attention.qk_norm)?)
                }
                LayerKind::GatedDelta => {
                    gdn += 1;
                    Mixer::GatedDelta(gdn - 1, up.gated_delta(i)?)
                }
            };
            layers.push(Layer {
                input_norm: up.vector(Logical::InputNorm(i))?,
                mixer,
                post_norm: up.vector(Logical::PostNorm(i))?,
                mlp: up.mlp(i)?,
            });
        }
        let tied = spec.tie_word_embeddings;
        let lm_head = if tied { embed } else { up.matrix(Logical::LmHead)? };
        let rope = up.rope(&spec.attention)?;
        Ok(Target {
            embed,
            lm_head,
            final_norm: up.vector(Logical::FinalNorm)?,
            layers,
            attention: AttentionShape {
                heads: spec.attention.num_heads,
                kv_heads: spec.attention.num_kv_heads,
                head_dim: spec.attention.head_dim,
                gated: spec.attention.gated,
                rope,
            },
            gdn: spec.gdn,
            eps: spec.rms_norm_eps,
            vocab: spec.real_vocab.unwrap_or(spec.vocab_size),
            intermediate: spec.intermediate_size,
        })
    }
}

impl Draft {
    /// Repacks all weights into device memory, straight from the mapped files.
    pub fn load(
        dev: &mut dyn Device,
        source: &DraftSource,
        progress: Progress<'_>,
    ) -> Result<Draft, Failure> {
        source.advise_sequential();
        let spec = source.spec();
        let mut up = Uploader { dev, source, done: 0, progress };
        let mut layers = Vec::with_capacity(spec.num_hidden_layers());
        for (i, layer) in spec.layers.iter().enumerate() {
            let convs = match &spec.dflash2 {
                None => None,
                Some(two) => {
                    let shape = (two.conv_kernel_size, two.conv_group_size);
                    let (a, b) = (Logical::AttnConvBase(i), Logical::AttnConvProj(i));
                    let (c, d) = (Logical::MlpConvBase(i), Logical::MlpConvProj(i));
                    Some([up.conv(a, b, shape)?, up.conv(c, d, shape)?])
                }
            };
            layers.push(DraftLayer {
                input_norm: up.vector(Logical::InputNorm(i))?,
                post_norm: up.vector(Logical::PostNorm(i))?,
                q: up.matrix(Logical::Q(i))?,
                k: up.matrix(Logical::K(i))?,
                v: up.matrix(Logical::V(i))?,
                o: up.matrix(Logical::O(i))?,
                q_norm: up.vector(Logical::QNorm(i))?,
                k_norm: up.vector(Logical::KNorm(i))?,
                mlp: up.mlp(i)?,
                window: layer.window,
                causal: layer.causal,
                convs,
            });
        }
        let selector = match &spec.dflash2 {
            None => None,
            Some(two) => Some(Selector {
                predecessor: up.codebook(Logical::SelectorPredecessor)?,
                successor: up.codebook(Logical::SelectorSuccessor)?,
                projection: up.matrix(Logical::SelectorHidden)?,
                rank: two.selector_rank,
                candidates: two.selector_top_k,
            }),
        };
        Ok(Draft {
            block: spec.block_size,
            mask_id: spec.mask_token_id,
            taps: spec.target_layer_ids.clone(),
            fc: up.matrix(Logical::Fc)?,
            hidden_norm: up.vector(Logical::HiddenNorm)?,
            norm: up.vector(Logical::FinalNorm)?,
            layers,
            selector,
            heads: spec.attention.num_heads,
            kv_heads: spec.attention.num_kv_heads,
            head_dim: spec.attention.head_dim,
            intermediate: spec.intermediate_size,
            rope: up.rope(&spec.attention)?,
            eps: spec.rms_norm_eps,
        })
    }
}

impl Uploader<'_> {
    fn attention(&mut self, i: usize, qk_norm: bool) -> Result<AttentionWeights, Failure> {
        let mut norm = |weight| if qk_norm { self.vector(weight).map(Some) } else { Ok(None) };
        let (q_norm, k_norm) = (norm(Logical::QNorm(i))?, norm(Logical::KNorm(i))?);
        Ok(AttentionWeights {
            q: self.matrix(Logical::Q(i))?,
            k: self.matrix(Logical::K(i))?,
            v: self.matrix(Logical::V(i))?,
            o: self.matrix(Logical::O(i))?,
            q_norm,
            k_norm,
        })
    }

    fn gated_delta(&mut self, i: usize) -> Result<GdnWeights, Failure> {
        Ok(GdnWeights {
            qkv: self.matrix(Logical::GdnQkv(i))?,
            z: self.matrix(Logical::GdnZ(i))?,
            b: self.matrix(Logical::GdnB(i))?,
            a: self.matrix(Logical::GdnA(i))?,
            out: self.matrix(Logical::GdnOut(i))?,
            conv: self.vector(Logical::GdnConv(i))?,
            decay: self.vector(Logical::GdnDecay(i))?,
            dt_bias: self.vector(Logical::GdnDtBias(i))?,
            norm: self.vector(Logical::GdnNorm(i))?,
        })
    }

    fn mlp(&mut self, i: usize) -> Result<Mlp, Failure> {
        Ok(Mlp {
            gate: self.matrix(Logical::Gate(i))?,
            up: self.matrix(Logical::Up(i))?,
            down: self.matrix(Logical::Down(i))?,
        })
    }

    fn conv(
        &mut self,
        base: Logical,
        projection: Logical,
        (taps, group): (usize, usize),
    ) -> Result<DynamicConv, Failure> {
        let both = self.vector(base)?;
        let half = both.bytes / 2;
        let base = [both.slice(0, half), both.slice(half, half)];
        Ok(DynamicConv { projection: self.matrix(projection)?, base, taps, group })
    }

    fn rope(&mut self, spec: &AttentionSpec) -> Result<Rope, Failure> {
        let inv_freq = self.floats(&spec.rope.inv_freq(), "rotary frequencies")?;
        let pairing: RopePairing = spec.rope.pairing;
        Ok(Rope { inv_freq, dims: spec.rope.dims, pairing })
    }

    fn vector(&mut self, weight: Logical) -> Result<Buf, Failure> {
        let values = self.source.vector(weight)?;
        self.floats(&values, &format!("{weight:?}"))
    }

    fn floats(&mut self, values: &[f32], what: &str) -> Result<Buf, Failure> {
        let buf = self.dev.alloc(4 * values.len(), what)?;
        self.dev.write(buf, bytemuck::cast_slice(values));
        Ok(buf)
    }

    /// A `[vocab, rank]` table in bf16, whatever float type it is stored in.
    fn codebook(&mut self, weight: Logical) -> Result<Buf, Failure> {
        let matrix = self.source.matrix(weight)?;
        if matches!(matrix.source, Source::Mlx { .. } | Source::Ggml { .. }) {
            let found = "a quantised table".to_owned();
            return Err(self.source.error(weight, "bf16, f16 or f32".to_owned(), found).into());
        }
        let row = 2 * matrix.k;
        let buf = self.dev.alloc(matrix.n * row, &format!("{weight:?}"))?;
        self.dev.upload(buf, 256 * row, &|_, offset, out| {
            let rows = offset / row..(offset + out.len()) / row;
            let mut scratch = Vec::new();
            if let Source::Dense { dtype, data } = matrix.rows(rows, &mut scratch).source {
                to_bf16(dtype, data, out);
            }
        });
        self.advance(&matrix);
        Ok(buf)
    }

    fn matrix(&mut self, weight: Logical) -> Result<Weight, Failure> {
        let matrix = self.source.matrix(weight)?;
        let (n, k) = (matrix.n, matrix.k);
        let refuse = |why: linear::PackError| {
            let expected = "a matrix that the kernels can hold".to_owned();
            Failure::from(self.source.error(weight, expected, why.to_string()))
        };
        // One tile tells the format; it also checks the sizes that all tiles share.
        let format = {
            let mut scratch = Vec::new();
            let tile = matrix.rows(0..TILE.min(n), &mut scratch);
            let Some(source) = plain(&tile) else {
                let expected = "a type that the kernels read".to_owned();
                let found = storage_name(&matrix.source).to_owned();
                return Err(self.source.error(weight, expected, found).into());
            };
            source.check(tile.n, k).map_err(refuse)?
        };
        let sizes = format.piece_bytes(k).zip(format.packed_bytes(n, k));
        let Some((piece, bytes)) = sizes else {
            return Err(refuse(linear::PackError::Inputs { k, unit: 1 }));
        };
        let buf = self.dev.alloc(bytes, &format!("{weight:?}"))?;
        let failed = Mutex::new(None);
        let rows_of_piece = format.piece_rows();
        self.dev.upload(buf, piece * (64 / rows_of_piece), &|order, offset, out| {
            let first = offset / piece * rows_of_piece;
            let rows = first..(first + out.len() / piece * rows_of_piece).min(n);
            let mut scratch = Vec::new();
            let part = matrix.rows(rows, &mut scratch);
            let source = plain(&part).unwrap_or(NOTHING);
            if let Err(why) = source.pack_piece(order, (part.n, k), 0, out) {
                *failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(why);
            }
        });
        let failed = failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        match failed {
            Some(why) => Err(refuse(why)),
            None => {
                self.advance(&matrix);
                Ok(Weight { buf, format, n, k })
            }
        }
    }

    /// After each matrix. The files' pages are given back at once, so that no second copy of the
    /// weights gathers in memory.
    fn advance(&mut self, matrix: &Matrix<'_>) {
        self.source.release();
        self.done += matrix.bytes();
        (self.progress)(self.done);
    }
}

/// Fits no matrix, so that packing it is an error.
const NOTHING: linear::Source<'static> =
    linear::Source::Dense { dtype: linear::DenseDtype::F32, data: &[] };

/// The packer's view of some rows, if it knows their storage. Rows of a synthetic matrix are never
/// synthetic themselves.
fn plain<'a>(matrix: &Matrix<'a>) -> Option<linear::Source<'a>> {
    match matrix.source {
        Source::Dense { dtype, data } => {
            let dtype = match dtype {
                FloatDtype::F32 => linear::DenseDtype::F32,
                FloatDtype::F16 => linear::DenseDtype::F16,
                FloatDtype::Bf16 => linear::DenseDtype::Bf16,
            };
            Some(linear::Source::Dense { dtype, data })
        }
        Source::Mlx { bits, group, scale, codes, scales, biases } => {
            let scale = match scale {
                FloatDtype::F32 => ScaleDtype::F32,
                FloatDtype::F16 => ScaleDtype::F16,
                FloatDtype::Bf16 => ScaleDtype::Bf16,
            };
            Some(linear::Source::Mlx { bits, group: group.into(), scale, codes, scales, biases })
        }
        Source::Ggml { ty, data } => {
            let ty = linear::GgmlType::from_id(ty.id())?;
            Some(linear::Source::Ggml { ty, data })
        }
        Source::Synth(_) => None,
    }
}

fn storage_name(source: &Source<'_>) -> &'static str {
    match source {
        Source::Dense { .. } => "floats",
        Source::Mlx { .. } => "MLX affine codes",
        Source::Ggml { ty, .. } => ty.name(),
        Source::Synth(_) => "a synthetic matrix",
    }
}

fn to_bf16(dtype: FloatDtype, data: &[u8], out: &mut [u8]) {
    let store = |out: &mut [u8; 2], x: f32| *out = half::bf16::from_f32(x).to_le_bytes();
    let out = out.as_chunks_mut::<2>().0;
    match dtype {
        FloatDtype::Bf16 => out.as_flattened_mut().copy_from_slice(data),
        FloatDtype::F16 => {
            let halves = data.as_chunks::<2>().0.iter().map(|b| half::f16::from_le_bytes(*b));
            out.iter_mut().zip(halves).for_each(|(out, x)| store(out, x.to_f32()));
        }
        FloatDtype::F32 => {
            let floats = data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
            out.iter_mut().zip(floats).for_each(|(out, x)| store(out, x));
        }
    }
}
