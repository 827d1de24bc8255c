//! Placeholder.
pub mod state_machine;
