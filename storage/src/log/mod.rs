//! The node-wide log (being built).

mod entry;
mod error;
mod group_log;
mod node_log;
mod options;

pub use entry::{Entry, EntryId, GroupKey, GroupLogState};
pub use error::LogError;
pub use group_log::{DurableCallback, GroupLog};
pub use node_log::{Log, LogStats, RecoveredGroup, Recovery};
pub use options::{Driver, Durability, FatalHandler, LogOptions, system_boot_id};
