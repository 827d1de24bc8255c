//! What the tests of every format on disk and wire share: golden files, damage, and counted allocations.
//!
//! - [`golden`]: the bytes of a version, held still in a file.
//! - [`damage`]: noise, and valid bytes with bits flipped, parts moved, ends cut and lengths set to extremes.
//! - [`allocation`]: how much memory a decoder took.
//!
//! A format's fuzz test is a property test named `fuzz_...`: `make test` runs it for a moment, `make fuzz` for as long as
//! asked. docs/formats.md lists all of them, and `tests/formats.rs` holds that list to the code.
//!
//! Only for tests: nothing that runs in production names this crate.

pub mod allocation;
pub mod damage;
pub mod golden;

pub use allocation::{Counting, frugal};
pub use damage::{bytes_or_damaged, damaged, one_bit};
