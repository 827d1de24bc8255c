//! A node among nodes: whose data it has, which replicas it holds, and how it keeps to what the meta group decided.
//!
//! Not here: what the meta group decides (`meta/`).

pub mod admission;
pub mod agent;
pub mod bootstrap;
pub mod checkpoints;
mod cluster_version;
pub mod disk_keeper;
mod disk_probe;
pub mod disk_watch;
pub mod error;
pub mod evictions;
pub mod freshness;
mod holds;
pub mod identity;
pub mod jobs;
pub mod membership;
pub mod moment;
pub mod node;
mod part_writer;
pub mod peer_clients;
pub mod proposer;
pub mod push_gate;
pub mod recoveries;
pub mod replica_start;
pub mod replicas;
pub mod scrub;
mod scrub_repair;
pub mod scrub_schedule;
pub mod sessions;
pub mod status;
pub mod steps;
pub mod tables;
mod unsafe_recovery;
