//! Free ports below the range from which the kernel takes ports for outgoing connections: a killed server's port must
//! still be free when it comes back.

use std::collections::HashSet;
use std::net::{Ipv4Addr, TcpListener};

/// `count` ports where nobody listens.
pub(crate) fn free(count: usize) -> Vec<u16> {
    let mut found = HashSet::new();
    for _ in 0..10_000 {
        let port = rand::random_range(20_000..32_000);
        if !found.contains(&port) && TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            found.insert(port);
            if found.len() == count {
                return found.into_iter().collect();
            }
        }
    }
    panic!("no {count} free ports between 20000 and 32000");
}
