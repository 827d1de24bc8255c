//! A node among nodes: whose data it has, which replicas it holds, and how it keeps to what the meta group decided.
//!
//! Not here: what the meta group decides (`meta/`).

pub mod identity;
