//! Credentials that the program gives, and may have to renew.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;
use object_store::azure::{AzureAccessKey, AzureCredential};
use object_store::gcp::GcpCredential;

use super::sendable::{Sent, flaw};

/// Credentials are renewed so long before they expire.
const RENEWED_BEFORE: Duration = Duration::from_secs(300);
/// Credentials without an end are asked for again after this time.
const ASKED_AGAIN: Duration = Duration::from_secs(300);

/// The name of errors of a source of the program.
pub(super) const SOURCE: &str = "credentials";

/// Credentials by the names of their parts, such as `access_key_id`.
#[derive(Clone, Default)]
pub struct CredentialParts {
    /// The parts. They are secret.
    pub parts: BTreeMap<String, String>,
    /// How long they are valid, if it is known.
    pub valid_for: Option<Duration>,
}

/// The program's own source of credentials.
pub trait CredentialSource: Debug + Send + Sync {
    /// Returns credentials. May block. The error says why there are none.
    fn fetch(&self) -> Result<CredentialParts, String>;
}

/// Credentials of a cloud, made of parts.
pub(super) trait OfParts: Sized + Debug + Send + Sync + 'static {
    fn of_parts(parts: &BTreeMap<String, String>) -> Result<Self, String>;
}

/// The credentials that a source gave.
#[derive(Debug)]
struct Given<T> {
    credentials: Arc<T>,
    asked_at: Instant,
    valid_until: Instant,
}

type Held<T> = Arc<Mutex<Option<Given<T>>>>;

/// Asks a source, and keeps its answer for a while.
#[derive(Debug)]
pub(super) struct Renewed<T> {
    source: Arc<dyn CredentialSource>,
    held: Held<T>,
}

impl<T> Renewed<T> {
    pub(super) fn new(source: &Arc<dyn CredentialSource>) -> Arc<Self> {
        Arc::new(Self { source: Arc::clone(source), held: Arc::default() })
    }
}

/// Credentials that can be dropped before their end.
pub(super) trait Forget: Send + Sync {
    /// Drops them, because the store has refused a request that began then. The next request asks
    /// for new ones. Newer ones are kept: many requests may be refused at once.
    fn forget(&self, began: Instant);
}

impl<T: Send + Sync> Forget for Renewed<T> {
    fn forget(&self, began: Instant) {
        // While it is locked, new ones are on their way.
        if let Ok(mut held) = self.held.try_lock() {
            held.take_if(|given| given.asked_at < began);
        }
    }
}

#[async_trait]
impl<T: OfParts> CredentialProvider for Renewed<T> {
    type Credential = T;

    async fn get_credential(&self) -> object_store::Result<Arc<T>> {
        let (source, held) = (Arc::clone(&self.source), Arc::clone(&self.held));
        let asked = tokio::task::spawn_blocking(move || renewed(&*source, &held)).await;
        let found = asked.unwrap_or_else(|_| Err("its thread has ended without an answer".to_owned()));
        found.map_err(|why| object_store::Error::Generic {
            store: SOURCE,
            source: format!("the source of credentials gave none: {why}").into(),
        })
    }
}

/// Returns what is held, or asks for new credentials. Others wait meanwhile.
fn renewed<T: OfParts>(source: &dyn CredentialSource, held: &Held<T>) -> Result<Arc<T>, String> {
    let mut held = held.lock().unwrap_or_else(PoisonError::into_inner);
    let now = Instant::now();
    if let Some(given) = held.as_ref().filter(|given| now < given.valid_until) {
        return Ok(Arc::clone(&given.credentials));
    }
    let CredentialParts { parts, valid_for } = source.fetch()?;
    let credentials = Arc::new(T::of_parts(&parts)?);
    let kept_for = valid_for.map_or(ASKED_AGAIN, |valid| valid.saturating_sub(RENEWED_BEFORE.min(valid / 4)));
    let given = |valid_until| Given { credentials: Arc::clone(&credentials), asked_at: now, valid_until };
    *held = now.checked_add(kept_for).map(given);
    Ok(credentials)
}

/// The part with a name. The error names parts, never their values.
fn part(parts: &BTreeMap<String, String>, name: &str, wanted: &str) -> Result<String, String> {
    optional_part(parts, name)?.ok_or_else(|| {
        if parts.is_empty() {
            return format!("they are empty. Return {wanted}");
        }
        let names: Vec<&str> = parts.keys().map(String::as_str).collect();
        format!("they have {}, and this store needs {wanted}. Return that", names.join(", "))
    })
}

/// The part with a name, if there is one. It must be one that can be sent.
fn optional_part(parts: &BTreeMap<String, String>, name: &str) -> Result<Option<String>, String> {
    let Some(value) = parts.get(name) else { return Ok(None) };
    let sent = if matches!(name, "secret_access_key" | "account_key") { Sent::Never } else { Sent::InHeader };
    let flaw = if value.is_empty() { Some("is empty") } else { flaw(value, sent) };
    flaw.map_or_else(|| Ok(Some(value.clone())), |flaw| Err(format!("{name} {flaw}. Return it without that")))
}

impl OfParts for AwsCredential {
    fn of_parts(parts: &BTreeMap<String, String>) -> Result<Self, String> {
        let wanted = "access_key_id and secret_access_key";
        let one = |name| part(parts, name, wanted);
        Ok(Self {
            key_id: one("access_key_id")?,
            secret_key: one("secret_access_key")?,
            token: optional_part(parts, "token")?,
        })
    }
}

impl OfParts for GcpCredential {
    fn of_parts(parts: &BTreeMap<String, String>) -> Result<Self, String> {
        Ok(Self { bearer: part(parts, "token", "token")? })
    }
}

impl OfParts for AzureCredential {
    fn of_parts(parts: &BTreeMap<String, String>) -> Result<Self, String> {
        if let Some(key) = optional_part(parts, "account_key")? {
            let key = AzureAccessKey::try_new(&key).map_err(|_| "account_key is not base64".to_owned())?;
            return Ok(Self::AccessKey(key));
        }
        Ok(Self::BearerToken(part(parts, "token", "account_key or token")?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default)]
    struct Counted {
        calls: Mutex<u32>,
        valid_for: Option<Duration>,
    }

    impl CredentialSource for Counted {
        fn fetch(&self) -> Result<CredentialParts, String> {
            let mut calls = self.calls.lock().unwrap();
            *calls += 1;
            let parts = BTreeMap::from([("token".to_owned(), format!("token {calls}"))]);
            Ok(CredentialParts { parts, valid_for: self.valid_for })
        }
    }

    fn token(source: &Counted, held: &Held<GcpCredential>) -> String {
        renewed(source, held).unwrap().bearer.clone()
    }

    #[test]
    fn credentials_are_kept_until_they_are_about_to_expire() {
        let (source, held) = (Counted::default(), Held::default());
        assert_eq!([token(&source, &held), token(&source, &held)], ["token 1", "token 1"]);
        let short = Counted { valid_for: Some(Duration::ZERO), ..Counted::default() };
        let held = Held::default();
        assert_eq!([token(&short, &held), token(&short, &held)], ["token 1", "token 2"]);
    }

    #[test]
    fn refused_credentials_are_replaced_once() {
        let source: Arc<dyn CredentialSource> = Arc::new(Counted::default());
        let renewed_by = Renewed::<GcpCredential>::new(&source);
        let token = || renewed(&*source, &renewed_by.held).unwrap().bearer.clone();
        let before = Instant::now();
        assert_eq!(token(), "token 1");
        let began = Instant::now();
        renewed_by.forget(began);
        assert_eq!(token(), "token 2");
        // Another request that was refused with the first token.
        renewed_by.forget(began);
        renewed_by.forget(before);
        assert_eq!(token(), "token 2");
    }

    #[test]
    fn errors_name_the_parts_and_hide_their_values() {
        let parts = BTreeMap::from([("token".to_owned(), "hidden".to_owned())]);
        let error = AwsCredential::of_parts(&parts).unwrap_err();
        assert!(error.contains("they have token") && !error.contains("hidden"), "{error}");
        AzureCredential::of_parts(&BTreeMap::new()).unwrap_err();
    }

    #[test]
    fn parts_that_cannot_be_sent_are_errors() {
        for (name, value) in [("access_key_id", "a\n"), ("secret_access_key", "hid\nden"), ("token", "tök")]
        {
            let mut parts: BTreeMap<String, String> = [("access_key_id", "a"), ("secret_access_key", "b")]
                .map(|(k, v)| (k.into(), v.into()))
                .into();
            parts.insert(name.to_owned(), value.to_owned());
            let error = AwsCredential::of_parts(&parts).unwrap_err();
            assert!(error.starts_with(name) && !error.contains(value), "{error}");
        }
        let empty = AwsCredential::of_parts(&BTreeMap::new()).unwrap_err();
        assert!(empty.contains("they are empty"), "{empty}");
    }
}
