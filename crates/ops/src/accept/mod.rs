//! Contract to be written.
