//! The meta group (group 0): who is in the cluster, which tables and shards there are, and who may do what next.
//!
//! `state.rs`, `set_optimizer.rs`, `jobs.rs` and `steps.rs` are the pure core, `machine.rs` drives it from the log and keeps it on
//! disk.
//!
//! Not here: acting on the state (`cluster/`), and telling clients about it (`routing/`).

pub mod jobs;
mod machine;
mod record;
mod set_optimizer;
pub mod state;
pub mod steps;

pub use machine::MetaMachine;
pub use record::MetaRecordError;
