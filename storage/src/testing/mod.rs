//! What tests of durable state need, for this crate and for those above it.
//!
//! Not here: the tests.

mod sim_disk;
mod sim_file;
mod sim_inode;
#[cfg(test)]
mod tests;

pub use sim_disk::{Loss, SimDisk};
