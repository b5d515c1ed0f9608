//! The numbers of a model, wherever they come from: what an uploader reads.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;

use serde_json::Value;

use crate::LoadError;
use crate::fields::Fields;
use crate::files::{Checkpoint, GgmlType, Kind, Storage, Tensor};
use crate::names::{Logical, Names};
use crate::synth::SynthMatrix;

/// Storage of floating-point numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FloatDtype {
    /// 32-bit IEEE.
    F32,
    /// 16-bit IEEE.
    F16,
    /// 16-bit brain float.
    Bf16,
}

impl FloatDtype {
    /// Bytes of one number.
    pub fn bytes(self) -> usize {
        match self {
            FloatDtype::F32 => 4,
            FloatDtype::F16 | FloatDtype::Bf16 => 2,
        }
    }

    fn of<'a>(storage: &Storage<'a>) -> Option<(FloatDtype, &'a [u8])> {
        match storage {
            Storage::F32(b) => Some((FloatDtype::F32, b)),
            Storage::F16(b) => Some((FloatDtype::F16, b)),
            Storage::Bf16(b) => Some((FloatDtype::Bf16, b)),
            Storage::U32(_) | Storage::Ggml(..) | Storage::Other(..) => None,
        }
    }
}

/// A weight matrix `[n, k]`: `n` outputs, `k` inputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Matrix<'a> {
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// Its numbers; the lengths fit `n` and `k`.
    pub source: Source<'a>,
}

/// How the numbers of a matrix are stored. Every row is a whole number of bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source<'a> {
    /// Row-major floats `[n, k]`.
    Dense {
        /// Their type.
        dtype: FloatDtype,
        /// `n · k` of them.
        data: &'a [u8],
    },
    /// MLX affine: `w = scale · code + bias`.
    Mlx {
        /// 2, 3, 4, 5, 6 or 8.
        bits: u8,
        /// Inputs that share a scale: 32, 64 or 128.
        group: u16,
        /// Type of scales and biases.
        scale: FloatDtype,
        /// `[n, k · bits / 32]` words; codes are packed from the lowest bit.
        codes: &'a [u8],
        /// `[n, k / group]`.
        scales: &'a [u8],
        /// `[n, k / group]`.
        biases: &'a [u8],
    },
    /// Blocks of ggml along the inputs.
    Ggml {
        /// The block format.
        ty: GgmlType,
        /// `n` rows of blocks.
        data: &'a [u8],
    },
    /// Made from a seed; [`Matrix::rows`] gives the bytes.
    Synth(SynthMatrix),
}

impl<'a> Matrix<'a> {
    /// Rows `[range.start, range.end)` as a matrix of their own, whose source is never
    /// [`Source::Synth`]: rows of a file are borrowed, rows of a synthetic matrix are made in
    /// `scratch`.
    ///
    /// # Panics
    /// If the rows don't lie inside the matrix.
    pub fn rows<'s>(&'s self, range: Range<usize>, scratch: &'s mut Vec<u8>) -> Matrix<'s> {
        let (start, end) = (range.start, range.end);
        assert!(start <= end && end <= self.n, "rows {start}..{end} of {}", self.n);
        let part = |bytes: &'a [u8]| {
            let row = bytes.len() / self.n;
            &bytes[start * row..end * row]
        };
        let source = match self.source {
            Source::Dense { dtype, data } => Source::Dense { dtype, data: part(data) },
            Source::Ggml { ty, data } => Source::Ggml { ty, data: part(data) },
            Source::Mlx { bits, group, scale, codes, scales, biases } => {
                let (codes, scales, biases) = (part(codes), part(scales), part(biases));
                Source::Mlx { bits, group, scale, codes, scales, biases }
            }
            Source::Synth(synth) => synth.rows(range, scratch),
        };
        Matrix { n: end - start, k: self.k, source }
    }

    /// Bytes of the matrix as stored.
    pub fn bytes(&self) -> u64 {
        match self.source {
            Source::Dense { data, .. } | Source::Ggml { data, .. } => data.len() as u64,
            Source::Mlx { codes, scales, biases, .. } => {
                (codes.len() + scales.len() + biases.len()) as u64
            }
            Source::Synth(synth) => synth.row_bytes() as u64 * self.n as u64,
        }
    }
}

/// Reads the weights of one checkpoint by what they do.
#[derive(Debug)]
pub(crate) struct Reader {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) names: Names,
    /// Norms are stored without their 1.
    pub(crate) plus_one: bool,
}

impl Reader {
    /// The matrix of a weight, checked to be `[n, k]`.
    pub(crate) fn matrix(
        &self,
        weight: Logical,
        [n, k]: [usize; 2],
    ) -> Result<Matrix<'_>, LoadError> {
        let tensor = self.names.require(&self.checkpoint, weight)?;
        if let Some(scales) = self.checkpoint.tensor(&format!("{}.scales", module(tensor.name))) {
            return self.mlx(&tensor, &scales, n, k);
        }
        let fail = |expected: String, found: String| {
            Err(LoadError::new(tensor.file, format!("tensor {}", tensor.name), expected, found))
        };
        if tensor.shape != [n, k] {
            return fail(format!("shape [{n}, {k}]"), format!("{:?}", tensor.shape));
        }
        if let Some((dtype, data)) = FloatDtype::of(&tensor.storage) {
            return Ok(Matrix { n, k, source: Source::Dense { dtype, data } });
        }
        match tensor.storage {
            Storage::Ggml(ty, data) => Ok(Matrix { n, k, source: Source::Ggml { ty, data } }),
            _ => {
                let expected = "F32, F16, BF16, MLX affine or a ggml format".to_owned();
                fail(expected, tensor.storage.dtype_name().to_owned())
            }
        }
    }

    /// A matrix in MLX's affine quantisation. Bits and group follow from the shapes; what the
    /// config says must agree.
    fn mlx<'a>(
        &'a self,
        codes: &Tensor<'a>,
        scales: &Tensor<'a>,
        n: usize,
        k: usize,
    ) -> Result<Matrix<'a>, LoadError> {
        let path = module(codes.name);
        let said = self.said_quantisation(path)?;
        let fail = |tensor: &Tensor, expected: String, found: String| {
            Err(LoadError::new(tensor.file, format!("tensor {}", tensor.name), expected, found))
        };
        let Storage::U32(code_bytes) = codes.storage else {
            let found = codes.storage.dtype_name().to_owned();
            return fail(codes, "U32, because it has scales".to_owned(), found);
        };
        let Some((scale, scale_bytes)) = FloatDtype::of(&scales.storage) else {
            let expected = "float scales (modes other than affine: not yet)".to_owned();
            return fail(scales, expected, scales.storage.dtype_name().to_owned());
        };
        let biases = self.checkpoint.require(&format!("{path}.biases"), &scales.shape)?;
        let bias_bytes = match FloatDtype::of(&biases.storage) {
            Some((dtype, bytes)) if dtype == scale => bytes,
            _ => {
                let found = biases.storage.dtype_name().to_owned();
                return fail(
                    &biases,
                    format!("{}, as its scales", scales.storage.dtype_name()),
                    found,
                );
            }
        };
        let group = match *scales.shape {
            [rows, groups] if rows == n && groups > 0 && k.is_multiple_of(groups) => k / groups,
            _ => 0,
        };
        if ![32, 64, 128].contains(&group) {
            let expected = format!("[{n}, {k} / group], of group 32, 64 or 128");
            return fail(scales, expected, format!("{:?}", scales.shape));
        }
        let bits = match *codes.shape {
            [rows, words] if rows == n && (words * 32).is_multiple_of(k) => words * 32 / k,
            _ => 0,
        };
        if ![2, 3, 4, 5, 6, 8].contains(&bits) {
            let expected = format!("[{n}, {k} · bits / 32], of 2, 3, 4, 5, 6 or 8 bits");
            return fail(codes, expected, format!("{:?}", codes.shape));
        }
        if let Some((said_bits, said_group)) = said
            && (said_bits, said_group) != (bits as u64, group as u64)
        {
            let expected =
                format!("{said_bits} bits in groups of {said_group}, as config.json says");
            return fail(codes, expected, format!("{bits} bits in groups of {group}"));
        }
        let (bits, group) = (bits as u8, group as u16);
        let (codes, scales, biases) = (code_bytes, scale_bytes, bias_bytes);
        Ok(Matrix { n, k, source: Source::Mlx { bits, group, scale, codes, scales, biases } })
    }

    /// Bits and group of a module as config.json gives them, if it does.
    fn said_quantisation(&self, path: &str) -> Result<Option<(u64, u64)>, LoadError> {
        let file = self.checkpoint.config_file();
        let root = Fields::root(&file, self.checkpoint.config())?;
        let all = match root.object("quantization", "quantization.")? {
            Some(all) => all,
            None => match root.object("quantization_config", "quantization_config.")? {
                Some(all) => all,
                None => return Ok(None),
            },
        };
        // Overrides have the module's path in the file; some converters leave the outer name out.
        let short = path.strip_prefix("language_model.").unwrap_or(path);
        let entry = [path, short].into_iter().find_map(|name| Some((name, all.get(name)?)));
        let fields = match entry {
            None | Some((_, Value::Bool(true))) => all,
            // The scales are there, so the module is quantised whatever the file says.
            Some((_, Value::Bool(false))) => return Ok(None),
            Some((name, _)) => match all.object(name, "quantization.<module>.")? {
                Some(own) => own,
                None => all,
            },
        };
        let mode = fields.str("mode")?.unwrap_or("affine");
        if mode != "affine" {
            return fields.error("mode", "affine (other modes: not yet)", mode);
        }
        let bits = fields.integer("bits", 2, 8)?;
        let group = fields.integer("group_size", 1, 1024)?;
        Ok(Some((fields.require("bits", bits)?, fields.require("group_size", group)?)))
    }

    /// The tensor of a vector of `len` elements in a float dtype.
    pub(crate) fn vector_tensor(
        &self,
        weight: Logical,
        len: usize,
    ) -> Result<Tensor<'_>, LoadError> {
        let tensor = self.names.require(&self.checkpoint, weight)?;
        let fail = |expected: String, found: String| {
            Err(LoadError::new(tensor.file, format!("tensor {}", tensor.name), expected, found))
        };
        if tensor.elements() != len {
            return fail(format!("{len} elements"), format!("shape {:?}", tensor.shape));
        }
        if FloatDtype::of(&tensor.storage).is_none() {
            return fail("F32, F16 or BF16".to_owned(), tensor.storage.dtype_name().to_owned());
        }
        if matches!(weight, Logical::GdnConv(_)) {
            let channels = len / 4;
            let fits = tensor.shape == [channels, 4]
                || tensor.shape == [channels, 1, 4]
                || tensor.shape == [channels, 4, 1];
            if !fits {
                let expected = format!("shape [{channels}, 4], with a 1 anywhere");
                return fail(expected, format!("{:?}", tensor.shape));
            }
        }
        Ok(tensor)
    }

    /// A vector in the form that the ops read: see [`Logical`] for what changes.
    pub(crate) fn vector(&self, weight: Logical, len: usize) -> Result<Vec<f32>, LoadError> {
        let tensor = self.vector_tensor(weight, len)?;
        let values = tensor.to_f32().unwrap_or_default();
        if let Some(i) = values.iter().position(|v| !v.is_finite()) {
            let (field, found) = (format!("tensor {}", tensor.name), values[i]);
            return Err(LoadError::new(tensor.file, field, "finite numbers", found));
        }
        Ok(match weight {
            Logical::GdnConv(_) => transposed(&values, len / 4, 4),
            // GGUF stores the decay itself.
            Logical::GdnDecay(_) if self.checkpoint.kind() == Kind::Safetensors => {
                values.iter().map(|&a| -f64::from(a).exp() as f32).collect()
            }
            w if self.plus_one && w.is_zero_centred() => values.iter().map(|v| v + 1.0).collect(),
            _ => values,
        })
    }

    /// Fails if the model's part of the checkpoint holds a tensor that no weight of `used` reads:
    /// it would mean something that we'd silently leave out.
    pub(crate) fn check_all_used(&self, used: &[Logical], layers: usize) -> Result<(), LoadError> {
        let mut names = HashSet::new();
        for &weight in used {
            for name in self.names.candidates(weight) {
                for part in ["scales", "biases"] {
                    names.insert(format!("{}.{part}", module(&name)));
                }
                names.insert(name);
            }
        }
        let unused = |name: &&str| !names.contains(*name) && !self.names.may_skip(name, layers);
        match self.checkpoint.names().into_iter().find(unused) {
            None => Ok(()),
            Some(name) => {
                let file = self.checkpoint.tensor(name).map_or(Path::new(""), |t| t.file);
                let expected = "only tensors that this architecture uses";
                Err(LoadError::new(file, format!("tensor {name}"), expected, "one it doesn't know"))
            }
        }
    }
}

/// The module of a tensor: its name without `.weight`.
fn module(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}

/// `[rows, columns]` as `[columns, rows]`.
fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let mut out = vec![0.0; values.len()];
    for r in 0..rows {
        for c in 0..columns {
            out[c * rows + r] = values[r * columns + c];
        }
    }
    out
}
