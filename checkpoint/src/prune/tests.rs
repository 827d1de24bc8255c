//! Prunes.
