//! The addresses a user gave.

use crate::Error;

/// Parses `http://a:1,http://b:2`; a missing scheme is added.
///
/// # Errors
/// [`Error::Refused`] naming the address that is none.
pub(crate) fn parse(addresses: &str) -> Result<Vec<String>, Error> {
    let mut parsed = Vec::new();
    for address in addresses.split(',').map(str::trim).filter(|a| !a.is_empty()) {
        let address = if address.contains("://") { address.to_string() } else { format!("http://{address}") };
        let address = address.trim_end_matches('/').to_string();
        let port =
            address.strip_prefix("http://").and_then(|rest| rest.rsplit_once(':')).map(|(_, port)| port);
        if port.is_none_or(|port| port.parse::<u16>().is_err()) {
            return Err(Error::invalid(format!("address {address:?} is not of the form http://host:port")));
        }
        if !parsed.contains(&address) {
            parsed.push(address);
        }
    }
    if parsed.is_empty() {
        return Err(Error::invalid("no address given: a cluster's address is like http://127.0.0.1:7400"));
    }
    Ok(parsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_split_and_nonsense_is_named() {
        assert_eq!(parse("http://a:1, b:2/").expect("valid"), vec!["http://a:1", "http://b:2"]);
        for bad in ["", "http://a", "ftp://a:1", "a:b"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
