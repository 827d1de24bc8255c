//! The shard as a whole: its machine over a real store, against a slow reference, through flushes, crashes and installs.

mod apply;
mod clear;
mod cold;
mod concurrent;
mod crash;
mod cut;
mod harness;
mod hot;
mod non_finite;
mod reference;
mod rules;
mod script;
mod scrub;
mod tensor;
