//! The words of the trade: tables, key ranges, sessions and what became of a push. No I/O, no clocks, no threads.
//!
//! Everything here that is part of a replica's state is changed by `apply` only, in log order, and is encoded by
//! `shard::small_state`.
//!
//! Not here: rows (`evershard_storage::table`), arithmetic (`optimizer`), the push body's layout (`evershard_proto`).

mod command_outcome;
mod definition_difference;
mod hyper_parameters;
mod key_range;
mod offence;
mod outcome;
mod row_rules;
mod schema;
mod schema_error;
mod session_table;
mod step_table;
mod tensor_schema;

pub use command_outcome::CommandOutcome;
pub use definition_difference::differences;
pub use key_range::KeyRange;
pub use offence::{Action, BadRows, BadValue, Offence, OffenceCounts, Source};
pub(crate) use outcome::refusal_kind;
pub use outcome::{OutcomeError, PushOutcome, Refusal, RefusalKind};
pub use row_rules::{RowNotes, RowRules, RowUse, needed_cluster_version};
pub use schema::{NonFinite, TableSchema};
pub use schema_error::SchemaError;
pub use session_table::{Admission, Session, SessionTable};
pub use step_table::{StepAdmission, StepProgress, StepTable};

/// The cluster version from which on tables may admit and evict rows.
pub const CLUSTER_VERSION_ROW_RULES: u32 = 1;
/// The highest cluster version that this build knows.
pub const CLUSTER_VERSION_MAX: u32 = evershard_proto::shard_command::CLUSTER_VERSION_CUTS;
