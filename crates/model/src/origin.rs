//! A target or a draft as the rest of the engine opens it: from files or synthetic.

use std::path::{Path, PathBuf};

use crate::LoadError;
use crate::draft_spec::DraftSpec;
use crate::files::{self, Checkpoint, Kind, TokenizerSource};
use crate::generation::GenerationConfig;
use crate::names::{Logical, Names};
use crate::source::{Matrix, Reader, Source};
use crate::spec::Spec;
use crate::synth::{self, SynthMatrix};

/// Where the numbers come from.
#[derive(Debug)]
enum Numbers {
    Files(Box<Reader>),
    Synth { name: PathBuf, seed: u64 },
}

/// An open target model, every weight of which is known to be there in the right shape.
#[derive(Debug)]
pub struct TargetSource {
    spec: Spec,
    generation: GenerationConfig,
    numbers: Numbers,
}

/// An open draft that fits its target.
#[derive(Debug)]
pub struct DraftSource {
    spec: DraftSpec,
    numbers: Numbers,
}

impl TargetSource {
    /// Opens a model folder, a GGUF file, or `synth:<name>`. Reads headers and small files only.
    ///
    /// # Errors
    /// If it can't be run: which file and field, and why.
    pub fn open(model: &Path) -> Result<TargetSource, LoadError> {
        match synthetic(model)? {
            Some((name, seed)) => {
                let spec = synth::target(name).ok_or_else(|| unknown_synth(model))?;
                let numbers = Numbers::Synth { name: model.to_owned(), seed };
                Ok(TargetSource { spec, generation: GenerationConfig::default(), numbers })
            }
            None => TargetSource::from_checkpoint(files::open(model)?),
        }
    }

    /// The model of an open checkpoint.
    ///
    /// # Errors
    /// See [`TargetSource::open`].
    pub fn from_checkpoint(checkpoint: Checkpoint) -> Result<TargetSource, LoadError> {
        let spec = Spec::from_checkpoint(&checkpoint)?;
        let generation = GenerationConfig::from_checkpoint(&checkpoint)?;
        if let Some(&id) =
            generation.eos_token_ids.iter().find(|&&id| id as usize >= spec.vocab_size)
        {
            let expected = format!("ids below the {} rows of the embedding", spec.vocab_size);
            return Err(LoadError::new(checkpoint.path(), "eos_token_id", expected, id));
        }
        let names = Names::of_target(&checkpoint);
        let reader = Reader { checkpoint, names, plus_one: spec.norm_plus_one };
        let mut used = spec.weights();
        for &weight in &used {
            verify(&reader, weight, spec.matrix_shape(weight), spec.vector_len(weight))?;
        }
        // A tied model may come with a copy of its table.
        used.push(Logical::LmHead);
        reader.check_all_used(&used, spec.num_hidden_layers())?;
        Ok(TargetSource { spec, generation, numbers: Numbers::Files(Box::new(reader)) })
    }

    /// The geometry.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Sampling defaults and the ids that end an answer.
    pub fn generation(&self) -> &GenerationConfig {
        &self.generation
    }

    /// Where the tokenizer and the chat template are.
    pub fn tokenizer(&self) -> &TokenizerSource {
        match &self.numbers {
            Numbers::Files(reader) => reader.checkpoint.tokenizer(),
            Numbers::Synth { .. } => &TokenizerSource::None,
        }
    }

    /// What was opened: a path, or `synth:…`.
    pub fn path(&self) -> &Path {
        self.numbers.path()
    }

    /// How it is stored; `None` if it is synthetic.
    pub fn kind(&self) -> Option<Kind> {
        self.numbers.kind()
    }

    /// A weight matrix.
    ///
    /// # Errors
    /// If the model has none of this name, or its file is at odds with itself.
    pub fn matrix(&self, weight: Logical) -> Result<Matrix<'_>, LoadError> {
        self.numbers.matrix(weight, self.spec.matrix_shape(weight))
    }

    /// A vector, in the form that the ops read (see [`Logical`]), norms with their 1.
    ///
    /// # Errors
    /// If the model has none of this name, or it holds numbers that aren't finite.
    pub fn vector(&self, weight: Logical) -> Result<Vec<f32>, LoadError> {
        self.numbers.vector(weight, self.spec.vector_len(weight))
    }

    /// Bytes of all matrices as stored, each counted once.
    ///
    /// # Errors
    /// As [`TargetSource::matrix`].
    pub fn matrix_bytes(&self) -> Result<u64, LoadError> {
        self.numbers.matrix_bytes(&self.spec.weights(), |w| self.spec.matrix_shape(w))
    }

    /// Tells the system that the files will be read once, front to back.
    pub fn advise_sequential(&self) {
        self.numbers.advise_sequential();
    }

    /// Gives the memory back that what was read so far takes. Reading it again works as before.
    pub fn release(&self) {
        self.numbers.release();
    }
}

impl DraftSource {
    /// Opens a draft for `target`: a folder, a GGUF file, or `synth:<name of the target>`.
    ///
    /// # Errors
    /// If it can't be run, or was made for another target: which file and field, and why.
    pub fn open(model: &Path, target: &Spec) -> Result<DraftSource, LoadError> {
        match synthetic(model)? {
            Some((name, seed)) => {
                let spec = synth::draft(name).ok_or_else(|| unknown_synth(model))?;
                let numbers = Numbers::Synth { name: model.to_owned(), seed: !seed };
                Ok(DraftSource { spec: spec.fitted_to(target, model)?, numbers })
            }
            None => DraftSource::from_checkpoint(files::open(model)?, target),
        }
    }

    /// The draft of an open checkpoint.
    ///
    /// # Errors
    /// See [`DraftSource::open`].
    pub fn from_checkpoint(
        checkpoint: Checkpoint,
        target: &Spec,
    ) -> Result<DraftSource, LoadError> {
        let spec = DraftSpec::from_checkpoint(&checkpoint)?;
        let spec = spec.fitted_to(target, &checkpoint.config_file())?;
        let names = Names::of_draft(&checkpoint);
        let reader = Reader { checkpoint, names, plus_one: false };
        let used = spec.weights();
        for &weight in &used {
            verify(&reader, weight, spec.matrix_shape(weight), spec.vector_len(weight))?;
        }
        reader.check_all_used(&used, spec.num_hidden_layers())?;
        Ok(DraftSource { spec, numbers: Numbers::Files(Box::new(reader)) })
    }

    /// The geometry.
    pub fn spec(&self) -> &DraftSpec {
        &self.spec
    }

    /// What was opened: a path, or `synth:…`.
    pub fn path(&self) -> &Path {
        self.numbers.path()
    }

    /// How it is stored; `None` if it is synthetic.
    pub fn kind(&self) -> Option<Kind> {
        self.numbers.kind()
    }

    /// A weight matrix.
    ///
    /// # Errors
    /// If the draft has none of this name, or its file is at odds with itself.
    pub fn matrix(&self, weight: Logical) -> Result<Matrix<'_>, LoadError> {
        self.numbers.matrix(weight, self.spec.matrix_shape(weight))
    }

    /// A vector; those of DFlash 2's static kernels are `[2, taps, hidden]`.
    ///
    /// # Errors
    /// If the draft has none of this name, or it holds numbers that aren't finite.
    pub fn vector(&self, weight: Logical) -> Result<Vec<f32>, LoadError> {
        self.numbers.vector(weight, self.spec.vector_len(weight))
    }

    /// Bytes of all matrices as stored, each counted once.
    ///
    /// # Errors
    /// As [`DraftSource::matrix`].
    pub fn matrix_bytes(&self) -> Result<u64, LoadError> {
        self.numbers.matrix_bytes(&self.spec.weights(), |w| self.spec.matrix_shape(w))
    }

    /// Tells the system that the files will be read once, front to back.
    pub fn advise_sequential(&self) {
        self.numbers.advise_sequential();
    }

    /// Gives the memory back that what was read so far takes. Reading it again works as before.
    pub fn release(&self) {
        self.numbers.release();
    }
}

impl Numbers {
    fn path(&self) -> &Path {
        match self {
            Numbers::Files(reader) => reader.checkpoint.path(),
            Numbers::Synth { name, .. } => name,
        }
    }

    fn kind(&self) -> Option<Kind> {
        match self {
            Numbers::Files(reader) => Some(reader.checkpoint.kind()),
            Numbers::Synth { .. } => None,
        }
    }

    fn matrix(&self, weight: Logical, shape: Option<[usize; 2]>) -> Result<Matrix<'_>, LoadError> {
        let Some([n, k]) = shape else { return Err(self.absent(weight, "matrix")) };
        match self {
            Numbers::Files(reader) => reader.matrix(weight, [n, k]),
            Numbers::Synth { seed, .. } => {
                let source = Source::Synth(SynthMatrix::new(weight, k, *seed));
                Ok(Matrix { n, k, source })
            }
        }
    }

    fn vector(&self, weight: Logical, len: Option<usize>) -> Result<Vec<f32>, LoadError> {
        let Some(len) = len else { return Err(self.absent(weight, "vector")) };
        match self {
            Numbers::Files(reader) => reader.vector(weight, len),
            Numbers::Synth { seed, .. } => Ok(synth::vector(weight, len, *seed)),
        }
    }

    fn matrix_bytes(
        &self,
        weights: &[Logical],
        shape: impl Fn(Logical) -> Option<[usize; 2]>,
    ) -> Result<u64, LoadError> {
        let matrices = weights.iter().filter(|&&w| shape(w).is_some());
        matrices.map(|&w| Ok(self.matrix(w, shape(w))?.bytes())).sum()
    }

    fn advise_sequential(&self) {
        if let Numbers::Files(reader) = self {
            reader.checkpoint.advise_sequential();
        }
    }

    fn release(&self) {
        if let Numbers::Files(reader) = self {
            reader.checkpoint.release();
        }
    }

    fn absent(&self, weight: Logical, what: &str) -> LoadError {
        let expected = format!("a {what} that this model has");
        LoadError::new(self.path(), format!("{weight:?}"), expected, "none")
    }
}

/// Whether one weight is there in the right shape and storage.
fn verify(
    reader: &Reader,
    weight: Logical,
    matrix: Option<[usize; 2]>,
    vector: Option<usize>,
) -> Result<(), LoadError> {
    match (matrix, vector) {
        (Some(shape), _) => reader.matrix(weight, shape).map(|_| ()),
        (None, Some(len)) => reader.vector_tensor(weight, len).map(|_| ()),
        (None, None) => Ok(()),
    }
}

/// The name and seed of a synthetic model.
fn synthetic(model: &Path) -> Result<Option<(&str, u64)>, LoadError> {
    match model.to_str().filter(|m| m.starts_with("synth:")) {
        None => Ok(None),
        Some(text) => match synth::parse_name(text) {
            Some(parsed) => Ok(Some(parsed)),
            None => Err(LoadError::new(model, "seed", "a whole number after the last colon", text)),
        },
    }
}

fn unknown_synth(model: &Path) -> LoadError {
    LoadError::new(model, "name", format!("one of {}", synth::NAMES.join(", ")), "another")
}
