//! Seeing a node: its log lines, its metrics, its health.
//!
//! Not here: what is measured where (each room counts its own, by the names in `metric_definitions.rs`).

mod http;
mod logging;
pub mod metric_definitions;

pub use http::{HttpError, HttpServer, Readiness};
pub use logging::init_logging;
