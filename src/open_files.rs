//! The process's limit of open files: each replica's RocksDB keeps up to 128 of them open, above the usual soft limit.

/// Raises the soft limit to the hard one. Answers what holds now; a system that refuses leaves it as it was, which is
/// logged: a node with few replicas runs all the same.
pub fn raise_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit writes one rlimit to the pointer, which is to a live local.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        tracing::warn!(error = %std::io::Error::last_os_error(), "the limit of open files is unknown");
        return 0;
    }
    if limit.rlim_cur < limit.rlim_max {
        let raised = libc::rlimit { rlim_cur: limit.rlim_max, rlim_max: limit.rlim_max };
        // SAFETY: setrlimit reads one rlimit from the pointer, which is to a live local.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const raised) } == 0 {
            return raised.rlim_cur;
        }
        tracing::warn!(error = %std::io::Error::last_os_error(), limit = limit.rlim_cur, "the limit of open files stays");
    }
    limit.rlim_cur
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_limit_never_shrinks() {
        let first = super::raise_limit();
        assert!(first > 0 && super::raise_limit() >= first);
    }
}
