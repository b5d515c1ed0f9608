//! The commands that watch a server: `traces` reads what it kept, `top` looks at it live.

pub mod live;
pub mod text;
pub mod top;
pub mod traces;
