//! What the engine computes: one folder per operation, and the devices that run them.
//!
//! An [`Op`] is plain data: buffers, shapes and dtypes. It carries its own definition
//! ([`Op::reference`], scalar), its SIMD implementation ([`Op::host`]), its geometry contract
//! ([`Op::check`]) and its cost ([`Op::cost`]). A [`Device`] runs ops and knows none by name.
//!
//! Everything that varies from one pass to the next (positions, kept rows, page tables, seeds)
//! lives in device buffers ([`LaneStep`]), never in an op's fields, so a recorded pass can be
//! replayed.

#![cfg_attr(
    all(feature = "cases", not(test)),
    allow(dead_code, unused_imports, reason = "case files also hold tests of the CPU alone")
)]

mod act;
mod chain;
mod device;
mod geometry;
mod kv;
mod op;
mod pool;
mod sampling;
mod step;
mod weight;

pub mod kernel;
pub mod random;
pub mod simd;
pub mod testing;

pub mod accept;
pub mod attention;
pub mod attn_mix;
pub mod attn_prepare;
pub mod block_conv;
pub mod copy_rows;
pub mod embed;
pub mod gated_delta;
pub mod gated_norm;
pub mod gdn_mix;
pub mod gdn_prepare;
pub mod head_gate;
pub mod linear;
pub mod propose;
pub mod rms_norm;
pub mod silu_mul;
pub mod top_k;

pub use attention::Attention;
pub use attn_mix::AttnMix;
pub use attn_prepare::{AttnPrepare, Queries, Rope, RopePairing};
pub use block_conv::{BlockConv, BlockConvOut};
pub use copy_rows::CopyRows;
pub use embed::Embed;
pub use gated_delta::GatedDelta;
pub use gated_norm::GatedNorm;
pub use gdn_mix::GdnMix;
pub use gdn_prepare::{Commit, GdnGeometry, GdnPrepare, HeadMap};
pub use head_gate::HeadGate;
pub use linear::{Linear, LinearPart};
pub use silu_mul::SiluMul;

pub use accept::{Accept, LaneResult, LogitRows};
pub use act::{ACT_GROUP, Act, ActDtype, ActGroup};
pub use device::{
    Counted, Counters, Device, DeviceError, DeviceInfo, Diff, Difference, DryRun, Fill, Host,
    HostMode, OpCount, PUBLISHED, PUBLISHED_BYTES, Trace,
};
pub use kv::{KvDtype, KvPool};
pub use op::{Access, Binding, Bindings, Buf, Cost, Elements, Mem, Op, Rounded, Unsupported};
pub use pool::Pool;
pub use propose::{Propose, Selector};
pub use rms_norm::RmsNorm;
pub use sampling::{
    LogitBias, MAX_STOPS, ONE, Proposals, Rule, SamplerParams, TOKEN_IN_PROMPT, count_tokens,
};
pub use step::{LaneStep, Lanes, PAGE_TOKENS, Pass};
pub use top_k::TopK;
pub use weight::{Codes, Format, IQ4_TABLE, ScaleDtype, TileOrder, Weight};

/// What a host implementation may use: the instruction set and the thread pool.
#[derive(Debug)]
pub struct Cpu {
    /// The vector instruction set chosen at start.
    pub isa: simd::Isa,
    /// The threads that share one op's work.
    pub pool: Pool,
}
