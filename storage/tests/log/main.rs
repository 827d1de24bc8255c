//! Tests of the node-wide log: what it promises while it runs, after a crash, and after damage.
//!
//! Not here: the formats of its parts (tested beside them).

mod basics;
mod crash;
mod damage;
mod full;
mod fuzz;
mod golden;
mod memory;
mod model;
mod one_report;
mod random;
mod retire;
mod script;
mod threaded;
