//! Placeholder, replaced in this session.
fn main() {}
