//! The meta group (group 0): who is in the cluster, which tables and shards there are, and who may do what next.
//!
//! `state.rs`, `set_optimizer.rs`, `cluster_version.rs`, `jobs.rs` and `steps.rs` are the pure core, `machine.rs` drives it from the log and keeps it on
//! disk.
//!
//! Not here: acting on the state (`cluster/`), and telling clients about it (`routing/`).

mod cluster_version;
pub mod jobs;
mod machine;
mod record;
mod set_optimizer;
pub mod state;
pub mod steps;

pub use machine::MetaMachine;
pub use record::MetaRecordError;
