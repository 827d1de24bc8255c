//! What tests of durable state need, for this crate and for those above it.
//!
//! Not here: the tests.
