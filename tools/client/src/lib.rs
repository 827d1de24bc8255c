//! The Rust client of Evershard: pull rows, push gradients, exactly once, through failovers.
//!
//! ```no_run
//! # async fn example() -> Result<(), evershard::Error> {
//! use evershard::{Client, ClientOptions, definition};
//! let client = Client::connect("http://127.0.0.1:7400", ClientOptions::default()).await?;
//! let items = client.create_table(definition::sparse("items", 16, definition::adagrad(0.05))).await?;
//! let rows = items.pull_vec(&[1, 2, 3]).await?;
//! items.push(&[1, 2, 3], &rows).await?;
//! # Ok(())
//! # }
//! ```
//!
//! A push walks: `batch` (sum duplicates, split by shard, cut into messages) -> `push_lane` (one per group: numbers the
//! messages, keeps the unacknowledged ones in order, sends them again to whoever leads) -> `node_channel` (one stream per
//! node). A pull walks: `batch` -> `pull` (a request a shard and megabyte) -> `replica_call` (who may answer) -> `node_channel`. A push of a job that sums its
//! steps: `batch` -> `contribution` (kept until the step is over) -> `node_channel`.
//!
//! Not here: the server. This crate knows the words of the wire (`evershard_proto`) and nothing else of ours.

mod acked;
mod admin;
mod backoff;
mod batch;
mod client;
mod contribution;
pub mod definition;
mod endpoints;
mod error;
mod group_call;
mod job;
mod node_channel;
mod non_finite;
mod options;
mod parts;
mod pull;
mod push;
mod push_lane;
mod replica_call;
mod routing_cache;
mod scan;
mod session;
mod stats;
mod table;
mod tensor;
mod unary;
mod worker;

pub use admin::Admin;
pub use client::Client;
pub use error::{Error, PartialPush, Refusal};
pub use evershard_proto::push_body::Encoding;
pub use evershard_proto::tensor::TensorLayout;
pub use evershard_proto::v1::{
    Admission, Consistency, ErrorKind, Eviction, JobDefinition, JobDescription, Optimizer, Routing,
    SetOptimizerRequest, TableDefinition, TableDescription, TensorDtype, WorkerDescription, WorkerState,
};
pub use job::{Aggregation, DeadWorkerPolicy, Job, JobOptions};
pub use options::ClientOptions;
pub use parts::{PullPart, PushPart};
pub use pull::{Absent, PullInfo, PullOptions};
pub use push::{PushHandle, PushOptions, PushReceipt};
pub use scan::{ScanOptions, ScanPiece, TableScan};
pub use stats::StatsSnapshot;
pub use table::Table;
pub use tensor::{Tensor, TensorVersion};
pub use worker::Worker;
