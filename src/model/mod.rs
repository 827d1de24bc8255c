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
mod outcome;
mod schema;
mod schema_error;
mod session_table;
mod step_table;
mod tensor_schema;

pub use command_outcome::CommandOutcome;
pub use definition_difference::differences;
pub use key_range::KeyRange;
pub(crate) use outcome::refusal_kind;
pub use outcome::{OutcomeError, PushOutcome, Refusal, RefusalKind};
pub use schema::{NonFinite, TableSchema};
pub use schema_error::SchemaError;
pub use session_table::{Admission, Session, SessionTable};
pub use step_table::{StepAdmission, StepProgress, StepTable};
